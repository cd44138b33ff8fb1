"""Loggers have every step once, whatever comes between; one is made of a file and an entry."""

import dataclasses
import importlib.util
import io
import json
import logging
import math
import sys
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import yaml
from rich.console import Console

from megatron_fanformer.checkpoint.run_folder import METRICS
from megatron_fanformer.errors import DivergenceError, FanformerError, InputError, Interrupted
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.loggers import (
    LOGGERS,
    TENSORBOARD_FOLDER,
    JSONLines,
    Logger,
    Loggers,
    LoggingConfig,
    Start,
    TensorBoard,
)
from megatron_fanformer.train.metrics import METRIC_TABLE, find_metric, read_metrics
from megatron_fanformer.train.preflight import machine_problems
from megatron_fanformer.train.start import _train
from tests.small_runs import RunOnRanks, small_run, write_tokens
from tests.train.test_recovery import Poison, train_poisoned

FOREIGN = [b"", b"\xff\xfe\x00 not text", b"[1, 2]", b"7", b'{"step": "8"}', b'{"steps": 1}', b"[" * 100_000, b"null"]
TOKENS = 64  # of a step


def start(run: Path, step: int = 0) -> Start:
    console = Console(file=io.StringIO())
    return Start(run=run, step=step, steps=20, values={}, logging=LoggingConfig(), console=console)


def test_a_resume_drops_later_steps(tmp_path: Path) -> None:
    steps = [json.dumps({"step": step, "loss": step / 2}).encode() for step in (1, 2, 3)]
    file = tmp_path / METRICS
    file.write_bytes(b"\n".join([steps[0], *FOREIGN, *steps[1:], b'{"step": 1']))
    lines = JSONLines(start(tmp_path, step=2))
    lines.write(3, {"loss": 4.0})
    lines.close()
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 1.0}, {"step": 3, "loss": 4.0}]


def test_a_line_stays_json_whatever_the_numbers_are(tmp_path: Path) -> None:
    lines = JSONLines(start(tmp_path))
    lines.write(1, {"loss": math.nan, "health/phase_max": [1.0, math.inf]})
    lines.close()
    (line,) = (tmp_path / METRICS).read_bytes().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "loss": None, "health/phase_max": [1.0, None]}


# -- all loggers of a run that logs steps 1 to 4, is killed, resumes after step 2, and logs 3 to 5 again


def loggers(run: Path, values: dict[str, Any] | None = None, **fields: Any) -> Loggers:
    begun = start(run)
    config = LoggingConfig(**{"tensorboard": False, **fields})
    return Loggers(dataclasses.replace(begun, values=values or {}, logging=config), {}, is_writer=True)


def metrics(step: int, life: int) -> dict[str, Any]:
    numbers: dict[str, Any] = {"loss": 10.0 * life + step, "tokens": TOKENS * step, "tokens_per_second": 1e3}
    if step % 2 == 0:
        numbers |= {"validation_loss/books, all": 0.5 * step, "health/phase_max": [1.0, 3.0, 2.0]}
    return numbers | ({"skipped": 'a "spike", twice'} if step == 3 else {})


def log_two_lives(run: Path, **fields: Any) -> None:
    first = loggers(run, {"optimizer": {"lr": 0.25}, "data": {"train_data": ["a"]}}, **fields)
    first.open(step=0)
    for step in range(1, 5):
        first.write(step, metrics(step, life=1))
    first.close()
    with (run / METRICS).open("a") as file:
        file.write('{"step": 5, "lo')
    second = loggers(run, {"optimizer": {"lr": 0.5}, "data": {"train_data": ["a"]}}, **fields)
    second.open(step=2)
    for step in range(3, 6):
        second.write(step, metrics(step, life=2))
    second.close()


LIVES = [1, 1, 2, 2, 2]  # of the five steps, the one that is to be shown


def test_tensorboard_shows_each_step_once_in_groups(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_two_lives(tmp_path, tensorboard=True)
    by_step = EventAccumulator(str(tmp_path / TENSORBOARD_FOLDER)).Reload()
    losses = by_step.Scalars("train/loss")
    expected = [(step, 10 * life + step) for step, life in enumerate(LIVES, 1)]
    assert [(event.step, event.value) for event in losses] == expected
    assert [event.value for event in by_step.Scalars("validation/validation_loss/books, all")] == [1.0, 2.0]
    assert [event.value for event in by_step.Scalars("train_health/phase_max")] == [3.0, 3.0]
    configurations = by_step.Tensors("configuration/text_summary")
    assert [b"lr: 0.25" in event.tensor_proto.string_val[0] for event in configurations] == [True, False]
    assert configurations[0].tensor_proto.string_val[0].startswith(b"```yaml\n")


def test_wandb_goes_on_with_its_run_and_gets_no_step_that_its_server_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = mock.MagicMock()
    run = wandb.init.return_value
    run.id, run.step = "abc", 0
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    log_two_lives(tmp_path, wandb_project="small", wandb_exp_name="two lives")
    assert [call.kwargs["id"] == "abc" for call in wandb.init.call_args_list] == [False, True]
    assert {call.kwargs["resume"] for call in wandb.init.call_args_list} == {"allow"}
    assert [call.kwargs["step"] for call in run.log.call_args_list] == [1, 2, 3, 4, 3, 4, 5]
    run.step = 5
    log_two_lives(tmp_path, wandb_project="small", wandb_exp_name="two lives")
    assert [call.kwargs["step"] for call in run.log.call_args_list[7:]] == [5]


@pytest.mark.parametrize("is_main", [True, False])
@pytest.mark.parametrize(
    ("error", "failed"), [(None, False), (Interrupted("stopped after step 2"), False), (DivergenceError("nan"), True)]
)
def test_the_loggers_are_told_how_a_run_ended(
    error: FanformerError | None, failed: bool, is_main: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = mock.Mock()
    trainer.train.side_effect = error
    monkeypatch.setattr("megatron_fanformer.train.trainer.Trainer", lambda *_: trainer)
    with nullcontext() if error is None else pytest.raises(type(error)):
        _train(mock.Mock(), mock.Mock(is_main=is_main), mock.Mock(), mock.Mock())
    trainer.close.assert_called_once_with(failed=failed)
    assert error is None or error.already_reported is not is_main  # every rank raises it


def test_a_logger_that_fails_is_left_out_with_one_warning_and_not_opened_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = loggers(tmp_path, tensorboard=True)
    monkeypatch.setattr(TensorBoard, "write", mock.Mock(side_effect=ConnectionError("no route to host")))
    with caplog.at_level(logging.WARNING, "megatron_fanformer"):
        opened.open(step=0)
        opened.write(1, {"loss": 1.0})
        opened.write(2, {"loss": 2.0})
        opened.open(step=1)  # where the run went back
        opened.write(2, {"loss": 2.5})
        opened.close()
    [line] = [record.getMessage() for record in caplog.records]
    assert line == "TensorBoard is without this run's metrics from here on: ConnectionError: no route to host"
    assert [entry["loss"] for entry in read_metrics(tmp_path)] == [1.0, 2.5]


def test_wandb_that_is_not_installed_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_from_dict(small_run("tokens", Path("run"), logging={"wandb_project": "small"}))
    find = importlib.util.find_spec
    folder = ModuleSpec("wandb", None)  # what Python finds of a folder without code
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: folder if name == "wandb" else find(name))
    assert [line for line in machine_problems(config) if "wandb" in line] == [
        "logging.wandb_project is set, but wandb is not installed; install megatron_fanformer[wandb], or turn it off"
    ]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / METRICS).mkdir()
    with pytest.raises(InputError, match=r"training\.run_dir .* cannot be written \(Is a directory\); free space"):
        loggers(tmp_path).open(step=0)
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == {}


# -- a logger of a file and an entry


STEPS = 12


class LossFile(Logger):
    """A line a step: its loss, or why it has none."""

    begun_after: ClassVar[list[int]] = []

    def __init__(self, start: Start) -> None:
        self.begun_after.append(start.step)
        file = start.run / "losses.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        self._file = file.open("w")
        self._file.writelines(f"{line}\n" for line in lines if int(line.split()[0]) <= start.step)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        print(step, metrics.get("loss", "skipped"), file=self._file)

    def close(self, *, failed: bool = False) -> None:
        self._file.close()


def train_with_it(values: dict[str, Any], bad: tuple[int, ...]) -> tuple[str | None, list[int]]:
    """Run a configuration with it and bad steps; what ended the run, if anything, and after which steps it began."""
    LossFile.begun_after.clear()
    with mock.patch.dict(LOGGERS, losses=LossFile):
        return train_poisoned(values, Poison(bad)), list(LossFile.begun_after)


@pytest.fixture(scope="module")
def run(run_on_ranks: RunOnRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped after step 4, resumed, sent back to step 5 by three bad steps, and complete."""
    folder = tmp_path_factory.mktemp("logged")
    tokens = write_tokens(folder / "random")
    values = small_run(
        tokens,
        folder / "run",
        parallel={"data_parallel_size": 2},
        data={"valid_data": {"held-out": [tokens]}},
        training={"train_iters": STEPS, "exit_interval": 4, "eval_interval": 4, "eval_iters": 1},
        checkpoint={"save_interval": 5},
        logging={"norm_interval": 1, "phase_interval": 1},
    )
    assert run_on_ranks(2, train_with_it, values, ()) == [(None, [0]), (None, [])]
    values["training"]["exit_interval"] = None
    assert run_on_ranks(2, train_with_it, values, (7, 8, 9)) == [(None, [4, 5]), (None, [])]
    return folder / "run"


def test_it_has_every_step_once(run: Path) -> None:
    expected = [f"{entry['step']} {entry.get('loss', 'skipped')}" for entry in read_metrics(run)]
    assert (run / "losses.txt").read_text().splitlines() == expected
    assert [line.split()[0] for line in expected if "skipped" in line] == ["7", "8", "9"]
    assert len(expected) == STEPS


def test_every_metric_of_a_run_is_in_the_table(run: Path) -> None:
    """Tasks and perplexity sets: `test_evaluation.py`."""
    found = {name: find_metric(name) for entry in read_metrics(run) for name in entry}
    assert [name for name, metric in found.items() if metric is None] == []
    absent = {metric.name for metric in METRIC_TABLE} - {metric.name for metric in found.values() if metric}
    assert {name for name in absent if not name.startswith("eval/")} == {
        "model_flops_utilization",  # of no chip here
        "z_loss",  # `test_trainer.py`
    }
