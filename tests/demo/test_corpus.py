import gzip
import json
from pathlib import Path

import pytest

from megatron_fanformer.demo.corpus import pack_standard_library
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


def documents(*paths: Path) -> list[dict[str, object]]:
    return [json.loads(line) for path in paths for line in gzip.open(path, "rb")]


def pack(library: Path, folder: Path) -> list[Path]:
    train, held_out = pack_standard_library(folder, shards=3, root=library)
    return [*train, held_out]


def test_every_module_is_packed_once_and_nothing_else(library: Path, tmp_path: Path) -> None:
    packed = documents(*pack(library, tmp_path / "out"))
    names = sorted(path.relative_to(library).as_posix() for path in library.rglob("module*.py"))
    assert sorted(str(document["id"]) for document in packed) == names
    assert all(document["text"] == (library / str(document["id"])).read_text() for document in packed)


def test_the_same_library_gives_the_same_bytes(library: Path, tmp_path: Path) -> None:
    first, second = ([path.read_bytes() for path in pack(library, tmp_path / name)] for name in ("one", "two"))
    assert first == second


def test_a_folder_without_sources_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too few"):
        pack_standard_library(tmp_path / "out", root=tmp_path)


def test_this_interpreters_library_leaves_about_a_twentieth_held_out(tmp_path: Path) -> None:
    train, held_out = pack_standard_library(tmp_path)
    assert 0.02 < len(documents(held_out)) / len(documents(*train)) < 0.1
