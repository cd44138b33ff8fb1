"""metrics.jsonl: an object a step. Lines that no run wrote are kept as they are."""

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from megatron_fanformer.checkpoint.run_folder import METRICS, metrics_entry
from megatron_fanformer.durable_files import naming, write_atomically
from megatron_fanformer.errors import FanformerError
from megatron_fanformer.train.loggers.logger import Logger, Start

logger = logging.getLogger(__name__)


class JSONLines(Logger):
    """Appends one object per step to metrics.jsonl."""

    is_needed = True
    files = (METRICS,)

    def __init__(self, start: Start) -> None:
        self._path = start.run / METRICS
        _drop_steps_after(self._path, start.step)
        self._file = self._path.open("a")

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        """Record the metrics of one step.

        Raises:
            FanformerError: the run's folder is gone.
        """
        is_there = self._path.exists() and os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        if not is_there:  # removed, or replaced, as editors do
            self._file.close()
            if not self._path.parent.is_dir():
                raise FanformerError(
                    f"{self._path.parent} was removed or renamed during the run, nothing more can be saved there; put "
                    "it back, and start again to resume from its last checkpoint"
                )
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
