"""What a run reports as it runs: a progress line, metrics.jsonl and TensorBoard."""

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_fanformer.checkpoint.store import METRICS, TENSORBOARD
from megatron_fanformer.durable_files import write_atomically


class MetricsWriter:
    """Appends one JSON object per step to metrics.jsonl, and the numbers to TensorBoard.

    A resumed run drops what was logged after the checkpoint that it resumes from, so that each step appears once.
    """

    def __init__(self, run: Path, *, first_step: int, tensorboard: bool) -> None:
        self._path = run / METRICS
        _drop_steps_from(self._path, first_step)
        self._file = self._path.open("a")
        self._tensorboard: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(run / TENSORBOARD), purge_step=first_step)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in metrics.items():
                if isinstance(value, int | float):
                    self._tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the files."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _drop_steps_from(path: Path, first_step: int) -> None:
    if not path.exists():
        return
    kept = [line for line in path.read_text().splitlines() if _step_of(line) < first_step]
    write_atomically(path, "".join(line + "\n" for line in kept))


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError):
        return float("inf")  # torn by a crash in the middle of a write


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All objects of a run's metrics.jsonl, in their order."""
    return [json.loads(line) for line in (run / METRICS).read_text().splitlines()]


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

    def update(self, step: int, metrics: dict[str, Any]) -> None:
        """Show a finished step, by its metrics."""
        status = "skipped"
        if "loss" in metrics:
            status = f"loss {metrics['loss']:.4f}  {metrics['tokens_per_second']:,.0f} tokens/s"
        self._bar.update(self._task, completed=step, status=status)
        if not self._console.is_terminal and (step % self._interval == 0 or step == self._total):
            line = f"step {step}/{self._total}  {status}  left {self._time_left(step)}"
            self._console.print(line, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """End the live line."""
        self._bar.stop()

    def _time_left(self, step: int) -> str:
        seconds = (time.monotonic() - self._started) / max(1, step - self._first) * (self._total - step)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}"
