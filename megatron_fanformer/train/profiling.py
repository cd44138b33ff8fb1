"""Profiles steps of a run by torch's profiler: a Chrome trace and a table of operations for each of
`logging.profile_ranks`, in the folder `traces` of the run.

Which steps is the same on all ranks: those of `logging.profile_steps`, or the next ones after a request, which the sum
of a step's numbers brings to all. Profiled steps compute the same numbers.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from megatron_fanformer.checkpoint.run_folder import TRACES, checkpoint_name
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.train.interrupts import Request
from megatron_fanformer.train.loggers import LoggingConfig

REQUESTED_STEPS = 3
TABLE_ROWS = 100

logger = logging.getLogger(__name__)


class Profiler:
    """Profiles the steps that are due; every rank has one, and makes the same calls in the same order.

    Args:
        run: the run's folder.
        request: this rank's request to profile.
    """

    def __init__(self, config: LoggingConfig, grid: RankGrid, run: Path, request: Request) -> None:
        self._grid, self._run, self._request = grid, run, request
        self._is_profiled = config.profile_ranks is None or grid.rank in config.profile_ranks
        first, last = config.profile_steps or (1, 0)
        self._configured, self._requested = range(first, last + 1), range(0)
        self._span: tuple[int, int] | None = None  # the steps of the profile that is going on
        self._profile: profile | None = None

    def profile_next(self, step: int) -> None:
        """Profile the steps after this one; does nothing where a profile is going on."""
        if self._span is None:
            self._requested = range(step + 1, step + 1 + REQUESTED_STEPS)

    @contextmanager
    def recording(self, step: int) -> Iterator[bool]:
        """Profile a training step if it is due, with what follows it unless it is the last; yields whether it is."""
        if self._span is None and (due := [steps for steps in (self._requested, self._configured) if step in steps]):
            self._span = step, due[0][-1]
            self._request.begin()
            if self._is_profiled:
                self._begin()
        if self._span is None:
            yield False
            return
        with record_function(f"step {step}"):
            yield True
        if step >= self._span[1]:
            self._finish(step)

    def close(self, step: int, *, failed: bool) -> None:
        """Write the profile that is going on after its last step, if one is and the run has not failed."""
        if self._span is not None and not failed:
            self._finish(step)
        elif self._profile is not None and self._grid.device == "cpu":  # a GPU's kernels may wait for other ranks
            self._profile.stop()

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available() and ProfilerActivity.CUDA in supported_activities():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        self._profile = profile(activities=activities)
        self._profile.start()

    def _finish(self, last: int) -> None:
        """Write the profile, as that of the steps taken so far; one that cannot be written ends no run."""
        assert self._span is not None
        folder = self._run / TRACES / f"{checkpoint_name(self._span[0])}-{last:08d}"
        recorded, self._profile, self._span, self._requested = self._profile, None, None, range(0)
        trace = folder / f"rank-{self._grid.rank:05d}.json.gz"
        try:
            if recorded is not None:
                if self._grid.device == "cuda":
                    torch.cuda.synchronize()
                recorded.stop()
                folder.mkdir(parents=True, exist_ok=True)
                recorded.export_chrome_trace(str(trace))
                averages = recorded.key_averages()
                by = "self_device_time_total" if self._grid.device == "cuda" else "self_cpu_time_total"
                table = averages.table(sort_by=by, row_limit=TABLE_ROWS, max_name_column_width=80)
                trace.with_name(f"rank-{self._grid.rank:05d}.txt").write_text(table)
            logger.info("profiled steps up to %d, in %s", last, folder)
        except (OSError, RuntimeError) as error:  # the latter is torch's
            trace.unlink(missing_ok=True)
            logger.warning("the profile up to step %d cannot be written: %s", last, error)
        self._request.end()
