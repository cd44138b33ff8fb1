"""A run's log on the terminal and in files, and its last lines."""

import json
import logging
import re
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer import cli
from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.cli import main
from megatron_fanformer.errors import InputError
from megatron_fanformer.generate.verb import GenerateConfig
from megatron_fanformer.runtime.device import NOTICES, quieten_libraries
from megatron_fanformer.train.metrics import last_metrics
from megatron_fanformer.train.run_log import NEW_TOKENS, last_lines, run_log
from tests.generate.making import write_tokenizer
from tests.small_runs import VOCAB_SIZE, RunOnRanks, small_run, write_config, write_tokens
from tests.train.test_start import start_here

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) rank \d+ [\w.]+: .+")

logger = logging.getLogger("megatron_fanformer.train.some_module")


def test_the_file_has_everything_and_the_terminal_what_is_for_the_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_log(rank=0) as log:
        logger.debug("before there was a file")
        log.write_to(tmp_path / "new" / "run.log")
        logger.info("saved [bold]this[/bold] :smile:")
        logger.debug("took 3 s")
    assert capsys.readouterr() == ("saved [bold]this[/bold] :smile:\n", "")
    lines = (tmp_path / "new" / "run.log").read_text().splitlines()
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    assert [line.split(" rank 0 megatron_fanformer.train.some_module: ")[1] for line in lines] == [
        "before there was a file",
        "saved [bold]this[/bold] :smile:",
        "took 3 s",
    ]


def test_warnings_reach_the_file_and_the_terminal_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(), run_log(rank=0) as log:
        warnings.simplefilter("always")
        quieten_libraries()
        log.write_to(tmp_path / "run.log")
        for _ in range(3):
            warnings.warn("this is slow", RuntimeWarning, stacklevel=1)
            warnings.warn(NOTICES[0], stacklevel=1)
    out, err = capsys.readouterr()
    assert (out.count("RuntimeWarning: this is slow"), err) == (1, "")
    text = (tmp_path / "run.log").read_text()
    assert text.count("WARNING rank 0 py.warnings:") == text.count("RuntimeWarning: this is slow") == 3
    assert NOTICES[0] not in out + text


def test_a_log_file_that_cannot_be_written_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"log file .* cannot be written .*--log-file"), run_log(rank=0) as log:
        log.write_to(tmp_path / "file" / "run.log")


# -- of a run


@pytest.fixture
def short_run(tmp_path: Path) -> dict[str, Any]:
    return small_run(
        write_tokens(tmp_path / "tokens"),
        tmp_path / "run",
        data={"tokenizer": str(write_tokenizer(tmp_path, VOCAB_SIZE))},
        training={"train_iters": 2},
        schedule={"lr_warmup_iters": 1},
    )


def test_a_run_says_the_same_on_the_terminal_with_a_log_file(
    tmp_path: Path, short_run: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tmp_path / "config.yaml", short_run))
    log = tmp_path / "run.log"
    assert main(["train", "--config", config, "--log-file", str(log)]) == 0
    out, err = capsys.readouterr()
    saved = f"step 2  saved {tmp_path / 'run' / 'checkpoints' / 'step-00000002'}"
    start, model, *_ = lines = out.splitlines()
    assert (err, start) == ("", "starting 1 rank on this machine")
    assert re.fullmatch(rf"a model of [\d,]+ parameters, 2 steps, in {tmp_path / 'run'}", model)
    assert "step 2/2  loss" in out
    assert lines[lines.index(saved) + 1].startswith("complete: 2 of 2 steps, 128 tokens; this start took ")
    next_commands = [shlex.split(line)[1:] for line in lines[lines.index("next:") + 1 :]]
    assert [main(command) for command in next_commands] == [0, 0, 0], capsys.readouterr().err
    assert (tmp_path / "run-hf" / "config.json").is_file()
    text = log.read_text()
    assert f"INFO rank 0 megatron_fanformer.train.saves: {saved}" in text
    assert "DEBUG rank 0 megatron_fanformer.data.check: checked 1 pairs" in text


def test_every_rank_of_several_writes_its_own(
    run_on_ranks: RunOnRanks, tmp_path: Path, short_run: dict[str, Any]
) -> None:
    short_run["logging"]["folder"] = str(tmp_path / "logs")
    short_run["data"]["train_data"] = [str(tmp_path / "none")]
    run_on_ranks(2, start_here, write_config(tmp_path / "config.yaml", short_run))
    for rank in range(2):
        text = (tmp_path / "logs" / f"rank-{rank:05d}.log").read_text()
        assert f"INFO rank {rank} megatron_fanformer.train.start: starting 2 ranks (dp=2)\n" in text
        assert f"ERROR rank {rank} megatron_fanformer.train.run_log: ended by InputError: data.train_data" in text


# -- the last lines


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
