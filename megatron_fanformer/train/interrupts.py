"""Interrupts of a run: requests to stop, to save, or to end in time.

One rank gets a request, and all act on it: the interrupts are summed with the numbers of every training step, and once
more after an evaluation or a save, which may take minutes.
"""

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.processes import SAVE_SIGNAL, seconds_since_start
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.parallel import RankGrid


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
        run: the folder in which a file requests a save; None: none does.
        minutes: since the start of the run's command, after which to end; None: never.
    """

    def __init__(self, run: Path | None = None, minutes: float | None = None) -> None:
        self._stop = self._save = False
        self._save_file = run and run / run_folder.SAVE_FILE
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
        has_file = self._save_file is not None and os.path.lexists(self._save_file)
        return Interrupts(stop=self._stop, end=time.monotonic() > self._end, save=self._save or has_file)

    def grant_save(self) -> None:
        """Note that the save that begins now grants all requests so far, and remove the file."""
        self._save = False
        if self._save_file is not None:
            self._save_file.unlink(missing_ok=True)


def share(interrupts: Interrupts, grid: RankGrid) -> Interrupts:
    """Return the pending requests of any rank; a collective call."""
    counts = torch.tensor(interrupts, dtype=torch.float64, device=grid.torch_device)
    dist.all_reduce(counts)
    return Interrupts(*(count > 0 for count in counts.tolist()))
