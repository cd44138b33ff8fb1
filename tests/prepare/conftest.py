"""What the tests of the preparation share: document files, and token files made of them."""

import gzip
from collections.abc import Iterable
from pathlib import Path

import pyarrow
import pytest
from isal import igzip
from pyarrow import parquet

from megatron_fanformer import stores
from tests.prepare.making import Prepare, WriteLines, as_line, prepare_files


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


@pytest.fixture
def mixed(write_lines: WriteLines) -> Path:
    """Seven lines: three documents and four refused lines."""
    lines = [as_line("one"), b"{", as_line(""), as_line("two\ttwo"), b'{"id": 1}', b"{", as_line("three")]
    return write_lines("mixed.jsonl", lines)


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A folder of each kind of file, one of them in a folder below."""
    lines = b"".join(as_line(f"document {number} " * 40) + b"\n" for number in range(300))
    (below := tmp_path / "documents" / "below").mkdir(parents=True)
    (below / "c.jsonl").write_bytes(lines)
    (below.parent / "a.jsonl.gz").write_bytes(igzip.compress(lines))
    table = pyarrow.table({"text": [f"row {number}" for number in range(5000)]})
    parquet.write_table(table, below.parent / "b.parquet", row_group_size=500)
    (below.parent / "own.manifest.json").write_text("{}")
    return below.parent


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause is waited for."""
    monkeypatch.setattr(stores.time, "sleep", lambda _: None)


@pytest.fixture(scope="session")
def token_prefix(tmp_path_factory: pytest.TempPathFactory, sample_files: list[Path], small_tokenizer_file: Path) -> str:
    """Token files of the thirty sample documents, with the small tokenizer."""
    prefix = str(tmp_path_factory.mktemp("tokens") / "samples")
    prepare_files(prefix, sample_files, small_tokenizer_file)
    return prefix
