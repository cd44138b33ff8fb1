"""What the tests of the data room share: a small exact tokenizer, and token files made with it."""

import gzip
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from megatron_fanformer.data.document_files import read_documents
from megatron_fanformer.data.tokenizer import train_sentencepiece
from tests.data.making import prepare_files

SAMPLES = Path(__file__).parents[1] / "samples"


@pytest.fixture(scope="session")
def sample_files() -> list[Path]:
    return sorted((SAMPLES / "dolma").glob("*.json.gz"))


@pytest.fixture(scope="session")
def sample_texts(sample_files: list[Path]) -> list[str]:
    return [text for file in sample_files for text in read_documents(file) if isinstance(text, str)]


@pytest.fixture(scope="session")
def olmo_tokenizer_file() -> Path:
    return SAMPLES / "tokenizers" / "allenai_gpt-neox-olmo-dolma-v1_5.json"


@pytest.fixture(scope="session")
def small_tokenizer_file(tmp_path_factory: pytest.TempPathFactory, sample_texts: list[str]) -> Path:
    code = ["def f(x):\n    if x:\n        return [x]\n\n" * 20]
    return train_sentencepiece(sample_texts + code, tmp_path_factory.mktemp("tokenizer") / "small", vocab_size=600)


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[[str, Iterable[bytes]], Path]:
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
