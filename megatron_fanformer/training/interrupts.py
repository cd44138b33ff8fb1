"""Interrupts of a run: requests to stop, to save, or to end in time.

One rank gets a request, and all act on it: the interrupts are summed with the numbers of every training step, and once
more after an evaluation or a save, which may take minutes.
"""

import logging
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_fanformer.processes import SAVE_SIGNAL, seconds_since_start
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.parallel import RankGrid

logger = logging.getLogger(__name__)


class Interrupts(NamedTuple):
    """Pending requests to stop, end or save, of this rank or of any rank."""

    stop: bool = False
    """Save and end, with exit code 5: a signal."""
    end: bool = False
    """Save and end, with exit code 0: `training.exit_duration_in_mins` are over."""
    save: bool = False
    """Save and go on: a signal, or a file."""


class InterruptListener:
    """Collects this rank's requests to stop, end or save.

    Args:
        save_file: the file whose presence requests a save, and which is removed after it; None: no file.
        minutes: since the start of the run's command, after which to end; None: never.
    """

    def __init__(self, save_file: Path | None = None, minutes: float | None = None) -> None:
        self._stop = self._save = False
        self._file, self._file_seen, self._file_granted = save_file, False, False
        started = time.monotonic() - seconds_since_start(devices.launcher_process() or os.getpid())
        self._end = started + 60 * (float("inf") if minutes is None else minutes)

    def note_signal(self, number: signal.Signals) -> None:
        """Note a signal."""
        if number == SAVE_SIGNAL:
            self._save = True
        else:
            self._stop = True

    def now(self) -> Interrupts:
        """Return this rank's pending requests."""
        if self._file is not None and not self._file_granted:
            self._file_seen = os.path.lexists(self._file)
        return Interrupts(stop=self._stop, end=time.monotonic() > self._end, save=self._save or self._file_seen)

    def begin_save(self) -> None:
        """Note that a state is about to be saved that includes all interrupts so far."""
        self._save = False
        self._file_granted, self._file_seen = self._file_seen, False

    def end_save(self) -> None:
        """Note that the save is published, and remove the file that requested it."""
        if self._file is None or not self._file_granted:
            return
        self._file_granted = False
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s cannot be removed (%s), and requests no further save", self._file, error.strerror)
            self._file = None


def share(interrupts: Interrupts, grid: RankGrid) -> Interrupts:
    """Return the pending requests of any rank; a collective call."""
    counts = torch.tensor(interrupts, dtype=torch.float64, device=grid.torch_device)
    dist.all_reduce(counts)
    return Interrupts(*(count > 0 for count in counts.tolist()))
