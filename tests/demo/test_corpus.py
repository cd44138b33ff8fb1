import gzip
import json
import os
from pathlib import Path

import pytest

from megatron_fanformer.demo.corpus import Corpus, pack_standard_library
from megatron_fanformer.errors import InputError

MODULES = 60


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library of 60 modules, and files that do not belong to the corpus."""
    root = tmp_path / "library"
    for number in range(MODULES):
        write(root / f"package{number % 3}" / f"module{number}.py", f"x = {number}\n\n\ndef f():\n\treturn x\n")
    for folder in ("test", "json/tests", "idlelib/idle_test", "site-packages", "lib2to3/tests", "a/__pycache__"):
        write(root / folder / "left_out.py", "left out")
    write(root / "notes.txt", "left out")
    (root / "latin1.py").write_bytes(b"# coding: latin-1\nname = '\xe9'\n")
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (1_700_000_000, 1_700_000_000 + len(text)))


def documents(*paths: Path) -> list[dict[str, object]]:
    return [json.loads(line) for path in paths for line in gzip.open(path, "rb")]


def pack(library: Path, folder: Path) -> Corpus:
    return pack_standard_library(folder, shards=3, root=library)


def test_every_module_is_packed_once_and_nothing_else(library: Path, tmp_path: Path) -> None:
    corpus = pack(library, tmp_path / "out")
    train, held_out = documents(*corpus.train), documents(corpus.held_out)
    names = sorted(str(document["id"]) for document in train + held_out)
    assert names == sorted(path.relative_to(library).as_posix() for path in library.rglob("module*.py"))
    assert (corpus.train_documents, corpus.held_out_documents) == (len(train), len(held_out))


def test_a_document_has_dolmas_fields_and_the_files_text(library: Path, tmp_path: Path) -> None:
    document = documents(*pack(library, tmp_path / "out").train)[0]
    assert document == {
        "id": document["id"],
        "text": (library / str(document["id"])).read_text(),
        "source": "python-standard-library",
        "added": "2023-11-14T22:13:48.000Z",  # of the youngest file: 22:13:20, and its 28 characters
        "created": document["created"],
        "metadata": document["metadata"],
    }


def test_the_same_library_gives_the_same_bytes(library: Path, tmp_path: Path) -> None:
    packed = [pack(library, tmp_path / name) for name in ("one", "two")]
    first, second = ([path.read_bytes() for path in (*corpus.train, corpus.held_out)] for corpus in packed)
    assert first == second


def test_a_folder_without_sources_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too few"):
        pack_standard_library(tmp_path / "out", root=tmp_path)


def test_this_interpreters_library_leaves_about_a_twentieth_held_out(tmp_path: Path) -> None:
    corpus = pack_standard_library(tmp_path)
    assert 0.02 < corpus.held_out_documents / corpus.train_documents < 0.1
