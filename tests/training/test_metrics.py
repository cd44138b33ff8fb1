"""A run's progress: the time that is left, from the steps of this start alone."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from megatron_fanformer.training import metrics


@pytest.mark.parametrize(
    ("done", "step", "passed", "left"),
    [(0, 1, 7.0, "0:02:13"), (0, 20, 7.0, "0:00:00"), (12, 14, 30.0, "0:01:30"), (0, 2, 7200.0, "18:00:00")],
    ids=["first", "last", "resumed", "hours"],
)
def test_the_time_left_is_that_of_the_steps_to_come(
    monkeypatch: pytest.MonkeyPatch, done: int, step: int, passed: float, left: str
) -> None:
    now = [1000.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now[0]))
    written = io.StringIO()
    line = metrics.ProgressLine(total_steps=20, done_steps=done, log_interval=1, console=Console(file=written))
    now[0] += passed
    line.write(step, {"loss": 2.0, "tokens_per_second": 1000.0})
    line.close()
    assert written.getvalue() == f"step {step}/20  loss 2.0000  1,000 tokens/s  left {left}\n"
