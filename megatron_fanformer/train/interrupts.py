"""Interrupts of a run: requests to stop, to save, or to end in time.

A request reaches one rank, and all ranks act on it: pending requests are summed over the ranks with the numbers of
every training step, and again after an evaluation or a save, which may take minutes.
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
    """Pending requests to stop, end or save, of one rank or of all ranks together."""

    stop: bool = False
    """Save and end with exit code 5, because a signal came."""
    end: bool = False
    """Save and end with exit code 0, because `training.exit_duration_in_mins` have passed."""
    save: bool = False
    """Save and continue, because a signal came or the file `run_folder.SAVE_FILE` exists."""


class InterruptListener:
    """Collects this rank's requests to stop, end or save.

    Args:
        run: the run's folder, where the file `run_folder.SAVE_FILE` requests a save; None: no file does.
        minutes: minutes from the start of the run's command to the request to end; None: no such request.
    """

    def __init__(self, run: Path | None = None, minutes: float | None = None) -> None:
        self._stop = self._save = False
        self._save_file = None if run is None else run / run_folder.SAVE_FILE
        started = time.monotonic() - seconds_since_start(devices.launcher_process() or os.getpid())
        self._end = started + 60 * (float("inf") if minutes is None else minutes)

    def note_signal(self, number: signal.Signals) -> None:
        """Note a request to save (SAVE_SIGNAL) or to stop (any other signal)."""
        if number == SAVE_SIGNAL:
            self._save = True
        else:
            self._stop = True

    def pending(self) -> Interrupts:
        """Return this rank's pending requests."""
        has_file = self._save_file is not None and os.path.lexists(self._save_file)
        return Interrupts(stop=self._stop, end=time.monotonic() > self._end, save=self._save or has_file)

    def shared(self, grid: RankGrid) -> Interrupts:
        """Return the pending requests of all ranks together; a collective call."""
        counts = torch.tensor(self.pending(), dtype=torch.float64, device=grid.torch_device)
        dist.all_reduce(counts)
        return Interrupts(*(count > 0 for count in counts.tolist()))

    def clear_save_requests(self) -> None:
        """Forget the requests to save so far, and remove the file: the save that begins now satisfies them."""
        self._save = False
        if self._save_file is not None:
            self._save_file.unlink(missing_ok=True)
