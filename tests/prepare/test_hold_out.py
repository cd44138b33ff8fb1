"""`prepare --hold-out N`: the very files of two preparations, however it is cut short."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.cli import main
from megatron_fanformer.prepare import prepare as hold_out
from tests.data.chat_making import made_up_chats
from tests.prepare.making import Prepare, as_line
from tests.prepare.test_interrupted import hashes

HoldOut = Callable[..., int]


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """Seven files, of which three shares are 0; 3 and 4; 1, 2, 5 and 6."""
    (folder := tmp_path / "documents").mkdir()
    for number, lines in enumerate((90, 30, 20, 40, 15, 5)):
        text = b"\n".join(as_line(f"file {number} document {n}") for n in range(lines))
        (folder / f"{number}.jsonl").write_bytes(text)
    (folder / "6.md").write_text("A page.")
    return folder


@pytest.fixture
def run(tmp_path: Path, documents: Path, small_tokenizer_file: Path) -> HoldOut:
    """The command, to x of a folder, with further words."""

    def run(folder: str, *words: str, parts: int = 3) -> int:
        output, tokenizer = str(tmp_path / folder / "x"), str(small_tokenizer_file)
        common = ["--output", output, "--tokenizer", tokenizer, "--workers", "1"]
        return main(["prepare", str(documents), "--hold-out", str(parts), *common, *words])

    return run


CHAT = {"chat": True, "chat_template": "olmo", "format": "npy"}


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--part-size", "500"], {"part_bytes": 500}),
        (["--chat", "--chat-template", "olmo", "--format", "npy"], CHAT),
    ],
    ids=["parts", "rows of chats"],
)
def test_both_are_the_files_of_two_preparations(
    tmp_path: Path,
    documents: Path,
    prepare: Prepare,
    run: HoldOut,
    words: list[str],
    settings: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "chat" in settings:
        for number, file in enumerate(sorted(documents.glob("*.jsonl"))):
            chats = made_up_chats(4 + number)
            file.write_text("\n".join(json.dumps({"messages": messages}) for messages in chats))
        (documents / "6.md").unlink()
    apart, files = tmp_path / "apart", sorted(documents.iterdir())
    held = hold_out.last_share(files, 3)
    prepare(apart / "x-validation", *held, **settings)
    prepare(apart / "x", *(file for file in files if file not in held), **settings)
    assert run("together", *words) == 0
    whole = hashes(tmp_path / "together")
    assert whole == hashes(apart) and len(whole) > 6
    capsys.readouterr()
    assert run("together", *words) == 0
    assert hashes(tmp_path / "together") == whole
    printed = capsys.readouterr().out.splitlines()
    number = len(files)
    x, same = f"{tmp_path}/together/x", "already exists, made from the same input with the same settings"
    assert [line for line in printed if " files, to " in line or "already" in line] == [
        f"validation: {len(held)} of {number} files, to {x}-validation",
        f"validation: {x}-validation {same}",
        f"training: {number - len(held)} of {number} files, to {x}",
        f"training: {x} {same}",
    ]


def test_a_stop_between_the_two_leaves_no_training_and_the_same_command_goes_on(
    tmp_path: Path, run: HoldOut, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("undisturbed") == 0
    prepare = hold_out.prepare

    def stopped(config: Any, *args: Any, **named: Any) -> Any:
        if not config.output.endswith("-validation"):
            raise KeyboardInterrupt
        return prepare(config, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(hold_out, "prepare", stopped)
        assert run("stopped") != 0
    assert {path.name.partition(".")[0] for path in (tmp_path / "stopped").iterdir()} == {"x-validation"}
    capsys.readouterr()
    assert run("stopped") == 0
    assert hashes(tmp_path / "stopped") == hashes(tmp_path / "undisturbed")
    assert "x-validation already exists" in capsys.readouterr().out


def test_what_is_of_other_inputs_is_refused_before_anything_is_written(
    tmp_path: Path, documents: Path, prepare: Prepare, run: HoldOut, capsys: pytest.CaptureFixture[str]
) -> None:
    """A PREFIX of all files beside a validation of some would be trained on what it is measured by."""
    prepare(tmp_path / "all" / "x", documents)
    before = hashes(tmp_path / "all")
    assert run("all") == 2
    assert "already exists with other inputs (7 files" in capsys.readouterr().err
    assert hashes(tmp_path / "all") == before

    assert run("shared") == 0
    before = hashes(tmp_path / "shared")
    for file in (tmp_path / "shared").glob("x.*"):
        file.unlink()
    assert run("shared", parts=2) == 2  # whose training would have files of the validation that stands
    assert "x-validation already exists with other inputs" in capsys.readouterr().err
    assert run("shared") == 0
    assert hashes(tmp_path / "shared") == before


def test_too_few_files_are_one_line_that_says_what_to_do(
    documents: Path, run: HoldOut, capsys: pytest.CaptureFixture[str]
) -> None:
    for parts, line in {
        8: "more than the files given (7), which are not cut; give more files",
        1: "at least 2",
    }.items():
        assert run("x", parts=parts) == 2
        errors = capsys.readouterr().err
        assert line in errors and errors.count("\n") == 1
    assert not (documents.parent / "x").exists()


def test_the_shares_are_about_equal_by_bytes_of_text(documents: Path) -> None:
    assert [path.name[0] for path in hold_out.last_share(sorted(documents.iterdir()), 3)] == ["1", "2", "5", "6"]
