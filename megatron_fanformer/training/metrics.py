"""What a run reports as it runs: a progress line, metrics.jsonl and TensorBoard."""

import json
import logging
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_fanformer.checkpoint.run_lock import FolderWatch, file_of
from megatron_fanformer.checkpoint.store import METRICS, TENSORBOARD
from megatron_fanformer.durable_files import write_atomically

logger = logging.getLogger(__name__)


class MetricsWriter:
    """Appends one JSON object per step to metrics.jsonl, and the numbers to TensorBoard.

    A resumed run drops what was logged after the checkpoint that it resumes from, so that each step appears once. Lines
    that no run wrote are kept as they are.
    """

    def __init__(self, run: Path, *, first_step: int, tensorboard: bool) -> None:
        self._path = run / METRICS
        _drop_steps_from(self._path, first_step)
        self._file = self._path.open("a")
        self._watch = FolderWatch(run)
        self._tensorboard: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(run / TENSORBOARD), purge_step=first_step)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step.

        Raises:
            FanformerError: the run's folder is gone, or another run's by now.
        """
        self._watch.check()
        if file_of(str(self._path)) != file_of(self._file.fileno()):  # removed, or replaced, as editors do
            self._file.close()
            self._file = self._path.open("a")
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
    *lines, _torn = path.read_bytes().split(b"\n")  # a crash in the middle of a write leaves a line without its end
    steps = [None if entry is None else entry["step"] for entry in map(metrics_entry, lines)]
    if None in steps:
        logger.warning("%s: line %d is not a step's metrics; such lines are kept", path, steps.index(None) + 1)
    kept = [line + b"\n" for line, step in zip(lines, steps, strict=True) if step is None or step < first_step]
    write_atomically(path, b"".join(kept))


def metrics_entry(line: bytes) -> dict[str, Any] | None:
    """What a line says of a step; None for one that is not a step's."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) and type(entry.get("step")) is int else None


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The metrics of every step in a run's metrics.jsonl, in their order; lines that are not a step's are left out."""
    return [entry for line in (run / METRICS).read_bytes().splitlines() if (entry := metrics_entry(line)) is not None]


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
