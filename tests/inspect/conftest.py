"""What the tests of the inspection room share: the command, and prepared token files."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_fanformer.cli import PROGRAM, main
from tests.conftest import SAMPLES
from tests.inspect.making import random_documents, write_ledger, write_manifest, write_npy, write_pair

TOKENIZER = SAMPLES / "tokenizers" / "allenai_gpt-neox-olmo-dolma-v1_5.json"


class Said(NamedTuple):
    """What a command did."""

    code: int
    out: str
    error: str


Inspect = Callable[..., Said]


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str]) -> Inspect:
    """`inspect("PATH", "--json")`: the command's exit code and output."""

    def run(*arguments: object) -> Said:
        capsys.readouterr()
        code = main(["inspect", *map(str, arguments)])
        captured = capsys.readouterr()
        assert all(line.startswith(f"{PROGRAM}: ") for line in captured.err.splitlines()), captured.err
        return Said(code, captured.out, captured.err.removeprefix(f"{PROGRAM}: ").rstrip("\n"))

    return run


class Prepared(NamedTuple):
    """Token files as `prepare` leaves them."""

    prefix: Path
    documents: list[list[int]]


def prepared(prefix: Path, write: Callable[..., str], **settings: str) -> Prepared:
    documents = random_documents(50_000)
    write(prefix, documents)
    write_ledger(prefix, documents)
    write_manifest(prefix, documents, TOKENIZER, **settings)
    return Prepared(prefix, documents)


@pytest.fixture
def pair(tmp_path: Path) -> Prepared:
    """A .bin and .idx pair with ledger and manifest."""
    return prepared(tmp_path / "docs", write_pair)


@pytest.fixture
def shard(tmp_path: Path) -> Prepared:
    """A .npy file with ledger and manifest."""
    return prepared(tmp_path / "shard", write_npy, format="npy")
