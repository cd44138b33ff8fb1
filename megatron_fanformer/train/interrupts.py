"""Interrupts of a run: requests to stop, to save, to end in time, or to profile.

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
    """Pending requests to stop, end, save or profile, of this rank or of any rank."""

    stop: bool = False
    """Save and end, with exit code 5: a signal."""
    end: bool = False
    """Save and end, with exit code 0: `training.exit_duration_in_mins` are over."""
    save: bool = False
    """Save and go on: a signal, or a file."""
    profile: bool = False
    """Profile the next steps: a file."""


class Request:
    """A request by a signal or by a file, which is removed once it has been granted.

    Args:
        file: the file; None: no file.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._signaled = self._file_seen = self._file_granted = False

    def note_signal(self) -> None:
        """Note a signal."""
        self._signaled = True

    def is_pending(self) -> bool:
        """Return whether there is a request that nothing has begun to grant."""
        if self._file is not None and not self._file_granted:
            self._file_seen = os.path.lexists(self._file)
        return self._signaled or self._file_seen

    def begin(self) -> None:
        """Note that the action that begins now grants all requests so far."""
        self._signaled = False
        self._file_granted, self._file_seen = self._file_granted or self._file_seen, False

    def end(self) -> None:
        """Note that the result is published, and remove the file that requested it."""
        if self._file is None or not self._file_granted:
            return
        self._file_granted = False
        self._file.unlink(missing_ok=True)


class InterruptListener:
    """Collects this rank's requests to stop, end, save or profile.

    Args:
        run: the folder in which files request a save or a profile; None: none do.
        minutes: since the start of the run's command, after which to end; None: never.
    """

    def __init__(self, run: Path | None = None, minutes: float | None = None) -> None:
        self._stop = False
        self.save = Request(run and run / run_folder.SAVE_FILE)
        self.profile = Request(run and run / run_folder.PROFILE_FILE)
        started = time.monotonic() - seconds_since_start(devices.launcher_process() or os.getpid())
        self._end = started + 60 * (float("inf") if minutes is None else minutes)

    def note_signal(self, number: signal.Signals) -> None:
        """Note a signal."""
        if number == SAVE_SIGNAL:
            self.save.note_signal()
        else:
            self._stop = True

    def now(self) -> Interrupts:
        """Return this rank's pending requests."""
        return Interrupts(
            stop=self._stop,
            end=time.monotonic() > self._end,
            save=self.save.is_pending(),
            profile=self.profile.is_pending(),
        )


def share(interrupts: Interrupts, grid: RankGrid) -> Interrupts:
    """Return the pending requests of any rank; a collective call."""
    counts = torch.tensor(interrupts, dtype=torch.float64, device=grid.torch_device)
    dist.all_reduce(counts)
    return Interrupts(*(count > 0 for count in counts.tolist()))
