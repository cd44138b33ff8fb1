"""The table of metrics, and a run's progress: the time that is left, from the steps of this start alone."""

import dataclasses
import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from megatron_fanformer.train.loggers import progress_line
from megatron_fanformer.train.loggers.registry import LoggingConfig
from megatron_fanformer.train.metrics import METRIC_TABLE, charts, dashboard_name
from tests.train.test_loggers import start


@pytest.mark.parametrize(
    ("done", "step", "passed", "left"),
    [(0, 1, 7.0, "0:02:13"), (0, 20, 7.0, "0:00:00"), (12, 14, 30.0, "0:01:30"), (0, 2, 7200.0, "18:00:00")],
    ids=["first", "last", "resumed", "hours"],
)
def test_the_time_left_is_that_of_the_steps_to_come(
    monkeypatch: pytest.MonkeyPatch, done: int, step: int, passed: float, left: str
) -> None:
    now = [1000.0]
    monkeypatch.setattr(progress_line, "time", SimpleNamespace(monotonic=lambda: now[0]))
    written = io.StringIO()
    logging = LoggingConfig(log_interval=1)
    begun = dataclasses.replace(start(Path(), step=done), logging=logging, console=Console(file=written))
    line = progress_line.ProgressLine(begun)
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


def test_a_chart_is_of_the_names_on_the_dashboard() -> None:
    found = charts()
    assert found["training"]["norms"] == ["train/grad_norm", "train/params_norm", "train/update_norm"]
    (losses,) = (tags for title, tags in found["training"].items() if title.startswith("loss"))
    for name in ("loss", "validation_loss/books, all", "eval/own/CrossEntropyLoss"):
        assert any(re.fullmatch(tag, dashboard_name(name)) for tag in losses)
