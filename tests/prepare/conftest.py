"""What the tests of the preparation share: document files, and token files made of them."""

import gzip
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.prepare.making import Prepare, WriteLines, prepare_files


@pytest.fixture(autouse=True)
def quick_workers(forked_workers: None) -> None:
    """Of preparations in this process."""


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for all tests, which is not this user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def prepare(small_tokenizer_file: Path) -> Prepare:
    """`prepare_files` with the small tokenizer: the prefix, then each file."""
    return lambda prefix, *files, **settings: prepare_files(str(prefix), list(files), small_tokenizer_file, **settings)


@pytest.fixture
def write_lines(tmp_path: Path) -> WriteLines:
    """Write lines, each ended by a line feed, to a document file of the test's folder."""

    def write(name: str, lines: Iterable[bytes]) -> Path:
        path = tmp_path / name
        data = b"".join(line + b"\n" for line in lines)
        path.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
        return path

    return write


@pytest.fixture(scope="session")
def token_prefix(tmp_path_factory: pytest.TempPathFactory, sample_files: list[Path], small_tokenizer_file: Path) -> str:
    """Token files of the thirty sample documents, with the small tokenizer."""
    prefix = str(tmp_path_factory.mktemp("tokens") / "samples")
    prepare_files(prefix, sample_files, small_tokenizer_file)
    return prefix
