"""metrics.jsonl: an object a step. Lines that no run wrote are kept as they are."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from megatron_fanformer.checkpoint.run_lock import FolderWatch, file_of
from megatron_fanformer.checkpoint.store import METRICS, metrics_entry
from megatron_fanformer.durable_files import naming, write_atomically
from megatron_fanformer.training.loggers.logger import Logger, Start

logger = logging.getLogger(__name__)


class JSONLines(Logger):
    """Appends one object per step to metrics.jsonl."""

    is_needed = True
    files = (METRICS,)

    def __init__(self, start: Start) -> None:
        self._path = start.run / METRICS
        _drop_steps_after(self._path, start.step)
        self._file = self._path.open("a")
        self._watch = start.watch or FolderWatch(start.run)

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step.

        Raises:
            FanformerError: the run's folder is gone, or another run's by now.
        """
        self._watch.check()
        if file_of(str(self._path)) != file_of(self._file.fileno()):  # removed, or replaced, as editors do
            self._file.close()
            self._file = self._path.open("a")
        with naming(self._path):
            self._file.write(msgspec.json.encode({"step": step, **metrics}).decode() + "\n")  # NaN as null
            self._file.flush()

    def close(self, *, failed: bool = False) -> None:
        """Close the file."""
        with suppress(OSError) if failed else naming(self._path):  # what failed before says more
            self._file.close()


def _drop_steps_after(path: Path, last_step: int) -> None:
    if not path.exists():
        return
    *lines, _torn = path.read_bytes().split(b"\n")  # a crash in the middle of a write leaves a line without its end
    steps = [None if entry is None else entry["step"] for entry in map(metrics_entry, lines)]
    if None in steps:
        logger.warning("%s: line %d is not a step's metrics; such lines are kept", path, steps.index(None) + 1)
    kept = [line + b"\n" for line, step in zip(lines, steps, strict=True) if step is None or step <= last_step]
    write_atomically(path, b"".join(kept))
