"""What `train` says last: by what the run's folder holds, and commands that work."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer import cli
from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.generate.verb import GenerateConfig
from megatron_fanformer.train.last_lines import NEW_TOKENS, last_lines
from megatron_fanformer.train.metrics import last_metrics
from tests.generate.making import write_tokenizer
from tests.small_runs import small_run, write_config

STEPS = 20
Change = Callable[[Path], object]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a complete run, as far as names and small files tell."""
    (tmp_path / "tokenizer").mkdir()
    run, metrics = tmp_path / "a run", [{"step": step, "tokens": 64 * step} for step in range(1, STEPS + 1)]
    checkpoint = run / run_folder.CHECKPOINTS / run_folder.checkpoint_name(STEPS)
    checkpoint.mkdir(parents=True)
    (checkpoint / run_folder.MEGATRON_METADATA).write_text("{}")
    (checkpoint.parent / run_folder.LATEST).write_text(checkpoint.name)
    write_tokenizer(tmp_path / "tokenizer").rename(checkpoint / "tokenizer.json")
    write_config(checkpoint / run_folder.CONFIG, {**small_run("tokens", run), "data": {"format": "pretraining"}})
    metrics[-1] |= {"validation_loss/web": 3.14159, "validation_loss/code": 2.5}
    (run / run_folder.METRICS).write_text("".join(json.dumps(entry) + "\n" for entry in metrics) + "not a step's\n")
    return run


def test_the_run_may_be_the_folder_at_hand(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    assert commands(Path("."))[-1] == ["convert", ".", f"{run}-hf", "--to", "hf"]


def commands(run: Path) -> list[list[str]]:
    """The verbs of the commands that are named, with their options."""
    words = [shlex.split(line) for line in last_lines(run, 93) if line.startswith("  ")]
    assert all(program == cli.PROGRAM for program, *_ in words)
    return [command for _, *command in words]


def checkpoint_of(run: Path) -> Path:
    found = run_folder.latest_checkpoint(run)
    assert found is not None
    return found


def test_what_was_made_and_what_can_be_done_with_it(run: Path) -> None:
    assert last_lines(run, 93.4) == [
        "complete: 20 of 20 steps, 1,280 tokens; validation loss 3.1416 (web), 2.5000 (code); this start took 0:01:33",
        f"in {run}: checkpoints/step-00000020, metrics.jsonl",
        "next:",
        f"  megatron-fanformer inspect '{run}'",
        f"  megatron-fanformer generate '{run}' --prompt The --max-new-tokens 8",
        f"  megatron-fanformer convert '{run}' '{run}-hf' --to hf",
    ]
    for command in commands(run):
        assert cli._parser().parse_known_args(command)[1] == []
    assert GenerateConfig.max_new_tokens == NEW_TOKENS


def changed(run: Path, pattern: str, to: str) -> None:
    file = checkpoint_of(run) / run_folder.CONFIG
    text, count = re.subn(pattern, to, file.read_text())
    assert count == 1
    file.write_text(text)


@pytest.mark.parametrize(
    ("change", "verbs"),
    [
        (lambda run: (checkpoint_of(run) / "tokenizer.json").unlink(), "inspect convert"),
        (lambda run: changed(run, "format: pretraining", "format: sft"), "inspect chat convert"),
        (lambda run: Path(f"{run}-hf").mkdir(), "inspect generate"),
        (lambda run: changed(run, "train_iters: 20", "train_iters: 21"), ""),
    ],
)
def test_no_command_is_named_that_would_be_refused(run: Path, change: Change, verbs: str) -> None:
    change(run)
    assert [verb for verb, *_ in commands(run)] == verbs.split()


def test_losses_of_another_step_are_not_the_last_ones(run: Path) -> None:
    lines: list[dict[str, Any]] = [{"step": 1, "loss": 1.0}, {"step": STEPS - 1, "validation_loss/web": 3.0}]
    (run / run_folder.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 20, "los')
    assert last_metrics(run) == lines[-1]
    assert "validation" not in last_lines(run, 1)[0]
