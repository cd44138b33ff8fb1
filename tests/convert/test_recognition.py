"""What a path is: one answer and one text for every command."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.manifest import MANIFEST
from megatron_fanformer.cli import PROGRAM, main
from megatron_fanformer.convert.recognition import (
    DESCRIPTIONS,
    KINDS,
    MODEL_TYPE,
    MODELS,
    OURS,
    RUNNABLE,
    TRACKER,
    Kind,
    checkpoint_of,
    find_checkpoint,
    recognize,
)
from megatron_fanformer.errors import InputError
from tests.small_runs import small_run, write_config, write_tokens

STEP = "step-00000003"


def make(folder: Path, kind: Kind) -> Path:
    """A path of a kind, as far as names and small files tell; returns it."""
    folder.mkdir()
    if kind in ("token files", "folder of token files"):
        for ending in (".bin", ".idx"):
            (folder / f"docs{ending}").touch()
        return folder / "docs" if kind == "token files" else folder
    if kind in OURS:
        checkpoint = folder / run_folder.CHECKPOINTS / STEP
        checkpoint.mkdir(parents=True)
        (checkpoint / run_folder.MEGATRON_METADATA).write_text("{}")
        (checkpoint / run_folder.CONFIG).write_text("model: {}\n")
        (checkpoint / MANIFEST).write_text("{}")
        (folder / run_folder.CHECKPOINTS / run_folder.LATEST).write_text(STEP)
        return folder if kind == "run" else checkpoint
    if kind == "megatron-lm":
        (iteration := folder / "iter_0000003").mkdir()
        (iteration / run_folder.MEGATRON_METADATA).write_text("{}")
        return iteration
    if kind == "hf":
        (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPE}))
    else:
        (folder / "config.yaml").write_text("model: {d_model: 8}\n")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_recognised(kind: Kind, tmp_path: Path) -> None:
    assert recognize(make(tmp_path / "path", kind)).kind == kind


def test_megatron_lm_may_save_into_a_folder_of_any_name(tmp_path: Path) -> None:
    make(tmp_path / run_folder.CHECKPOINTS, "megatron-lm")
    (tmp_path / run_folder.CHECKPOINTS / TRACKER).write_text("3\n")
    target = recognize(tmp_path / run_folder.CHECKPOINTS)
    assert target.kind == "megatron-lm"
    assert checkpoint_of(target) == tmp_path / run_folder.CHECKPOINTS / "iter_0000003"


@pytest.mark.parametrize(
    ("inside", "path", "kind"),
    [
        ("checkpoints", ".", "run"),
        (f"checkpoints/{STEP}", "..", "run"),
        (f"checkpoints/{STEP}", "../..", "run"),
        (f"checkpoints/{STEP}", "../../checkpoints/.", "run"),
        (f"checkpoints/{STEP}", ".", "checkpoint"),
        (f"checkpoints/{STEP}/sub", "..", "checkpoint"),
        (".", f"checkpoints/{STEP}/..", "run"),
    ],
)
def test_a_path_from_within_a_run(
    inside: str, path: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(tmp_path / "run", "run")
    (run / inside).mkdir(exist_ok=True)
    monkeypatch.chdir(run / inside)
    target = recognize(path)
    assert target.kind == kind
    assert target.path.absolute().resolve() == (run if kind == "run" else run / run_folder.CHECKPOINTS / STEP)
    assert run_folder.step_of(checkpoint_of(target)) == 3


def test_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / run_folder.CONFIG).write_text("training: {}\nmodel: {}\n")
    assert recognize(tmp_path / "run").kind == "run"
    with pytest.raises(InputError, match="is a run's folder without a checkpoint yet"):
        find_checkpoint(tmp_path / "run")


def test_a_hugging_face_folder_may_hold_checkpoints_of_somebodys_training(tmp_path: Path) -> None:
    """DeepSpeed names the last of its own in a file `latest`; and the folder may have any name."""
    (make(tmp_path / "path", "hf") / run_folder.CHECKPOINTS).mkdir()
    (make(tmp_path / "trained", "hf") / run_folder.LATEST).write_text("global_step500")
    make(tmp_path / run_folder.CHECKPOINTS, "hf")
    for name in ("path", "trained", run_folder.CHECKPOINTS):
        target = recognize(tmp_path / name)
        assert (target.kind, target.path) == ("hf", tmp_path / name)


Ask = Callable[[Path, Path], list[str]]


def train_from(path: Path, tmp_path: Path) -> list[str]:
    values = small_run(write_tokens(tmp_path / "tokens"), tmp_path / "run", checkpoint={"load": str(path)})
    return ["train", "--config", str(write_config(tmp_path / "config.yaml", values))]


ASKING: list[tuple[Ask, tuple[Kind, ...], str]] = [
    (lambda path, tmp_path: ["convert", str(path), str(tmp_path / "out"), "--to", "hf"], MODELS, ""),
    (lambda path, _: ["generate", str(path), "--prompt", "a"], RUNNABLE, ""),
    (lambda path, _: ["inspect", str(path)], tuple(kind for kind in KINDS if kind != "megatron-lm"), ""),
    (train_from, OURS, "checkpoint.load: "),
]


@pytest.mark.parametrize(("ask", "wanted", "prefix"), ASKING, ids=["convert", "generate", "inspect", "train"])
def test_every_command_says_the_same_of_a_path_and_names_what_it_takes(
    ask: Ask, wanted: tuple[Kind, ...], prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    others: list[Kind] = [kind for kind in KINDS if kind not in wanted]
    is_what = {make(tmp_path / f"path-{kind}", kind): f"is {DESCRIPTIONS[kind]}" for kind in others}
    is_what[tmp_path / "none"] = "does not exist"
    is_what[tmp_path / "empty"] = "is a folder of unknown kind"
    is_what[tmp_path / "gpt2"] = "is a folder of unknown kind: its config.json has model_type 'gpt2', not 'fanformer'"
    (tmp_path / "notes.txt").write_text("some words\n")
    is_what[tmp_path / "notes.txt"] = "is a file, not a folder"
    for path, it in is_what.items():
        assert main(ask(path, tmp_path)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        start, _, names = line.removeprefix(f"{PROGRAM}: ").rpartition("; name ")
        assert start == f"{prefix}{path} {it}"
        assert names.replace(" or ", ", ") == ", ".join(DESCRIPTIONS[kind] for kind in wanted).replace(" or ", ", ")
