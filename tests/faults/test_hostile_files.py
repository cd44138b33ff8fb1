"""Hostile files under every verb that reads them: each ends in time, in little memory, in one line, and none is run."""

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.manifest import write_manifest
from tests.faults import commands, hostile_files
from tests.faults.conftest import Things
from tests.faults.hostile_files import Write
from tests.small_runs import write_config

MOST_BYTES = 2 << 30
REFUSED = (2, 3)
UNREADABLE = ("pipe", "device", "huge")


@pytest.fixture
def memory() -> Iterator[None]:
    """Fails a test whose process takes more than 2 GB beside what earlier tests have left."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = held("VmRSS")
    yield
    assert held("VmHWM") - before < MOST_BYTES


def held(name: str) -> int:
    """Bytes of this process, by a name of the kernel's."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{name}:"))


def assert_refused(arguments: Sequence[str], folder: Path, codes: Sequence[int] = REFUSED) -> str:
    ended = commands.run(arguments)
    assert not (wrong := ended.unlike(codes, most_lines=1)), f"{wrong} of {arguments}: {ended.errors[:2_000]}"
    assert not list(folder.rglob("marker")), arguments
    return ended.errors


def some_of(cases: "dict[tuple[str, str], Write]", some: Sequence[str]) -> "list[object]":
    """All of them; those whose name is not among `some` are for the full tests."""
    return [
        pytest.param(name, write, id=" ".join(name), marks=() if name[1] in some else pytest.mark.full)
        for name, write in cases.items()
    ]


def train(things: Things, run: Path, **sections: "dict[str, object]") -> list[str]:
    values = {name: {**things.values.get(name, {}), **sections.get(name, {})} for name in {**things.values, **sections}}
    values["training"]["run_dir"] = str(run)
    return ["train", "--config", str(write_config(run.with_suffix(".yaml"), values))]


def readers_of_a_run(things: Things, run: Path, tmp_path: Path) -> list[list[str]]:
    return [
        ["inspect", str(run)],
        ["inspect", str(run), "--verify"],
        ["generate", str(run), "--prompt", "a", "--max-new-tokens", "1"],
        ["convert", str(run), str(tmp_path / "out"), "--to", "reference", "--no-verify"],
        train(things, tmp_path / "new", checkpoint={"load": str(run)}),
        train(things, run),
    ]


def readers_of_an_export(export: Path, tmp_path: Path) -> list[list[str]]:
    return [
        ["inspect", str(export), "--verify"],
        ["generate", str(export), "--prompt", "a", "--max-new-tokens", "1"],
        ["convert", str(export), str(tmp_path / "converted"), "--to", "megatron", "--no-verify"],
    ]


def test_sound_things_are_read(things: Things, tmp_path: Path) -> None:
    """What is refused below is refused for what was done to it."""
    run = shutil.copytree(things.run, tmp_path / "run")
    for arguments in (*readers_of_a_run(things, run, tmp_path), *readers_of_an_export(things.export, tmp_path)):
        ended = commands.run(arguments)
        assert ended.code == 0, ended.errors


@pytest.mark.parametrize(
    ("place", "write"),
    some_of(
        {**hostile_files.CHECKPOINTS, **hostile_files.TENSORS},
        ("pipe", "a pickle", "a link out of it"),
    ),
)
def test_checkpoints(place: tuple[str, str], write: Write, things: Things, tmp_path: Path, memory: None) -> None:
    run = shutil.copytree(things.run, tmp_path / "run")
    checkpoint = run / run_folder.CHECKPOINTS / things.checkpoint.name
    if place[0] == "common.pt" and not (checkpoint / "common.pt").exists():
        pytest.skip("this megatron-core keeps plain values among the tensors")
    for file in list(checkpoint.glob(place[0])):
        write(file)
    if place[1] not in UNREADABLE:  # whose sums would show it: here the readers alone are under test
        write_manifest(checkpoint, 2)
    for arguments in readers_of_a_run(things, run, tmp_path):
        if place in hostile_files.TENSORS and arguments[0] == "inspect":
            continue  # it reads none but for their sums
        if place[0] == "tokenizer.json" and arguments[0] == "train":
            continue  # a run brings its own tokenizer
        assert_refused(arguments, tmp_path)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("place", "write"),
    some_of(hostile_files.EXPORTS, ("nested", "layers", "a header without end", "pipe", "an exabyte")),
)
def test_exports(place: tuple[str, str], write: Write, things: Things, tmp_path: Path, memory: None) -> None:
    export = shutil.copytree(things.export, tmp_path / "export")
    write(export / place[0])
    for arguments in readers_of_an_export(export, tmp_path):
        assert_refused(arguments, tmp_path)


@pytest.mark.parametrize(("place", "write"), some_of(hostile_files.TOKENS, ("counts", "nested")))
def test_token_files(place: tuple[str, str], write: Write, things: Things, tmp_path: Path, memory: None) -> None:
    for file in things.folder.glob("tokens.*"):
        shutil.copy(file, tmp_path)
    write(tmp_path / place[0])
    prefix = str(tmp_path / "tokens")
    assert_refused(["inspect", prefix, "--verify"], tmp_path)
    assert_refused(train(things, tmp_path / "new", data={"train_data": [prefix]}), tmp_path)


@pytest.mark.parametrize(("place", "write"), some_of(hostile_files.TOKENIZERS, ("nested", "binary")))
def test_tokenizers(place: tuple[str, str], write: Write, things: Things, tmp_path: Path, memory: None) -> None:
    file = tmp_path / place[0]
    shutil.copy(things.tokenizer, file)
    write(file)
    text = "a" * 40 + "!"  # on which a backtracking match takes longer than anybody waits
    documents = tmp_path / "documents.jsonl"
    documents.write_text(f'{{"text": "{text}"}}\n')
    out = str(tmp_path / "out")
    for arguments in (
        ["prepare", str(documents), "--output", out, "--tokenizer", str(file), "--workers", "1"],
        ["generate", str(things.run), "--prompt", text, "--max-new-tokens", "1", "--tokenizer", str(file)],
    ):
        assert_refused(arguments, tmp_path)
