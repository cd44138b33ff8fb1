"""The lines of metrics.jsonl, and a run's progress on the terminal. (`loggers` writes the former.)"""

import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_fanformer.checkpoint.store import METRICS, metrics_entry
from megatron_fanformer.durable_files import regular_file

TAIL_BYTES = 1 << 20  # of metrics.jsonl: more than one step's metrics of any model


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The metrics of every step in a run's metrics.jsonl, in their order; lines that are not a step's are left out."""
    return [entry for line in (run / METRICS).read_bytes().splitlines() if (entry := metrics_entry(line)) is not None]


def last_metrics(run: Path) -> dict[str, Any] | None:
    """The metrics of the last step in a run's metrics.jsonl, of which only the end is read; None if there is none."""
    with regular_file(run / METRICS).open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = stream.read().split(b"\n")
    # after the last line end: a partial line, or nothing
    return next((entry for line in reversed(lines[:-1]) if (entry := metrics_entry(line)) is not None), None)


def clock(seconds: float) -> str:
    """A time of seconds as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


class ProgressLine:
    """A live line on a terminal; elsewhere a line every `log_interval` steps."""

    def __init__(self, *, total_steps: int, done_steps: int, log_interval: int, console: Console) -> None:
        self._console, self._interval, self._total = console, log_interval, total_steps
        self._started, self._first = time.monotonic(), done_steps
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[status]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=total_steps, completed=done_steps, status="")
        self._bar.start()

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Show a finished step, by its metrics."""
        status = "skipped"
        if "loss" in metrics:
            status = f"loss {metrics['loss']:.4f}  {metrics['tokens_per_second']:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, status=status)
        if not self._console.is_terminal and (step % self._interval == 0 or step == self._total):
            line = f"step {step}/{self._total}  {status}  left {clock(self._seconds_left(step))}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def close(self, *, failed: bool = False) -> None:
        """End the live line."""
        self._bar.stop()

    def _seconds_left(self, step: int) -> float:
        return (time.monotonic() - self._started) / max(1, step - self._first) * (self._total - step)
