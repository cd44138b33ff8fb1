"""A run's progress on the terminal."""

import time
from typing import Any

from megatron_fanformer.train.loggers.logger import Logger, Start
from megatron_fanformer.train.metrics import console_text


def clock(seconds: float) -> str:
    """Return a time of seconds as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


class ProgressLine(Logger):
    """Shows a live line on a terminal; elsewhere prints a line every `log_interval` steps."""

    is_needed = True

    def __init__(self, start: Start) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console, self._interval, self._total = start.console, start.logging.log_interval, start.steps
        self._started, self._first = time.monotonic(), start.step
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[status]}"),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=start.steps, completed=start.step, status="")
        self._bar.start()

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Show a finished step, by its metrics."""
        status = console_text(metrics) or "skipped"
        self._bar.update(self._task, completed=step, status=status)
        if not self._console.is_terminal and (step % self._interval == 0 or step == self._total):
            line = f"step {step}/{self._total}  {status}  left {clock(self._seconds_left(step))}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def close(self, *, failed: bool = False) -> None:
        """End the live line."""
        self._bar.stop()

    def _seconds_left(self, step: int) -> float:
        return (time.monotonic() - self._started) / max(1, step - self._first) * (self._total - step)
