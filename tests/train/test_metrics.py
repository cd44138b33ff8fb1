"""The table of metrics, the time that is left, and the picture of losses."""

import dataclasses
import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from megatron_fanformer.train import loggers
from megatron_fanformer.train.loggers import LoggingConfig
from megatron_fanformer.train.metrics import (
    METRIC_TABLE,
    dashboard_name,
    loss_picture,
)
from tests.train.test_loggers import start


@pytest.mark.parametrize(
    ("done", "step", "passed", "left"),
    [(12, 14, 30.0, "0:01:30"), (0, 2, 7200.0, "18:00:00")],
)
def test_the_time_left_is_that_of_the_steps_to_come(
    monkeypatch: pytest.MonkeyPatch, done: int, step: int, passed: float, left: str
) -> None:
    now = [1000.0]
    monkeypatch.setattr(loggers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    written = io.StringIO()
    logging = LoggingConfig(log_interval=1)
    begun = dataclasses.replace(start(Path(), step=done), logging=logging, console=Console(file=written))
    line = loggers.ProgressLine(begun)
    now[0] += passed
    line.write(step, {"loss": 2.0, "tokens_per_second": 1000.0})
    line.close()
    assert written.getvalue() == f"step {step}/20  loss 2.0000  1,000 tokens/s  left {left}\n"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("params_norm", "train/params_norm"),
        ("work_seconds/median", "train_speed/work_seconds/median"),
        ("evaluation_seconds", "validation/evaluation_seconds"),
        ("eval/downstream/copa_acc", "validation/downstream/copa_acc"),
        ("recovery/rewinds", "train_recovery/rewinds"),
        ("of_a_later_version", "train/of_a_later_version"),
    ],
)
def test_every_metric_has_a_group(name: str, shown: str) -> None:
    assert dashboard_name(name) == shown


def test_the_losses_are_in_the_first_group() -> None:
    """Dashboards sort them by name."""
    groups = {dashboard_name(metric.name).partition("/")[0] for metric in METRIC_TABLE}
    assert min(groups) == "train"


def test_losses_are_drawn() -> None:
    metrics = [{"step": step, "loss": 2 / step} for step in (1, 2, 3)] + [
        {"step": 4, "loss": 0.5, "validation_loss/v": 1}
    ]
    assert loss_picture(metrics, title="a run", entropy=3).startswith(b"\x89PNG")
