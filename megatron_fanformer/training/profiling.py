"""Profiles steps of a run: torch's trace of each of `logging.profile_ranks`, in the folder `traces` of the run.

Which steps is the same on all ranks: those of `logging.profile_steps`, or the next ones after a request, which the sum
of a step's numbers brings to all. What is profiled computes the same numbers; where nothing is, it costs a comparison.

Torch names operations and kernels. What it does not name gets a range: the steps (`step 100`), parts of them (`phase
forward`), and, while a profile is going on, waiting for a collective.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from isal import igzip
from torch.profiler import ProfilerActivity, record_function, supported_activities

from megatron_fanformer.durable_files import publish, refusal_of, temporary_name
from megatron_fanformer.runtime.collectives import methods_replaced
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.training.interrupts import Request
from megatron_fanformer.training.loggers.registry import LoggingConfig
from megatron_fanformer.training.traces import STEP, WAIT, memory_file, trace_file, trace_folder

REQUESTED_STEPS = 3
TAIL_BYTES = 100

logger = logging.getLogger(__name__)


class Profiler:
    """Profiles the steps that are due; every rank has one, and makes the same calls in the same order.

    A profile that cannot be written is left out with a warning: it is no reason to stop training.

    Args:
        run: the run's folder.
        request: what this rank is requested to profile by.
    """

    def __init__(self, config: LoggingConfig, grid: RankGrid, run: Path, request: Request) -> None:
        self._grid, self._run, self._request = grid, run, request
        self._records_memory = config.record_memory_history
        self._ranks = range(grid.world_size) if config.profile_ranks is None else config.profile_ranks
        self._configured = range(0) if config.profile_steps is None else _steps(*config.profile_steps)
        self._requested = range(0)
        self._due = range(0)  # of these, the steps that are being profiled
        self._first = self._last = 0  # of those, that have been; 0: none is being profiled
        self._profile: torch.profiler.profile | None = None  # None on ranks without one
        self._held, self._ranges = ExitStack(), ExitStack()  # all that is on while this rank is profiled

    def profile_next(self, step: int, count: int = REQUESTED_STEPS) -> None:
        """Profile the steps after this one; does nothing where a profile is going on."""
        if not self._first:
            self._requested = _steps(step + 1, step + count)

    @contextmanager
    def recording(self, step: int) -> Iterator[bool]:
        """Profile a training step if it is due, with what follows it unless it is the last; yields whether it is."""
        if self._first and step != self._last + 1:  # the run went back
            self._stop()
        if not self._first:
            self._due = next((steps for steps in (self._requested, self._configured) if step in steps), range(0))
            if not self._due:
                yield False
                return
            self._begin(step)
        self._last = step
        with record_function(f"{STEP}{step}"):
            yield True
        if step == self._due[-1]:
            self._finish()

    def close(self, *, failed: bool) -> None:
        """End the profile that is going on, if one is, and write it unless the run has failed."""
        if self._first and not failed:
            self._finish()
        if failed and self._profile_is_of_gpu:
            self._held.pop_all()  # torch's end of it waits for kernels, which may wait for other ranks
        self._stop()

    def _begin(self, step: int) -> None:
        self._request.begin()
        self._first = step
        if self._grid.rank not in self._ranks:
            return
        file = trace_file(trace_folder(self._run, step, self._due[-1]), self._grid.rank)
        if file.exists():  # of the run before it was resumed, or went back
            logger.warning("step %d  %s is there and is kept; remove it to profile these steps again", step, file)
            return
        self._wait_for_device()
        if self._records_memory:
            self._held.enter_context(_recorded_memory())
        self._profile = self._held.enter_context(torch.profiler.profile(activities=activities()))
        self._ranges.enter_context(_named_waits())

    def _finish(self) -> None:
        """Write the profile, as that of the steps taken so far."""
        first, last, profile = self._first, self._last, self._profile
        self._wait_for_device()
        folder = trace_folder(self._run, first, last)
        try:
            if profile is not None:
                folder.mkdir(parents=True, exist_ok=True)
                self._write(profile, trace_file(folder, self._grid.rank))
            if profile is not None or self._grid.rank not in self._ranks:
                logger.info("profiled steps %d to %d, in %s", first, last, folder)
        except (OSError, RuntimeError) as error:  # the latter is torch's
            logger.warning("the profile of steps %d to %d cannot be written: %s", first, last, error)
        finally:
            self._stop()
            self._requested = range(0)
            self._request.end()

    def _write(self, profile: torch.profiler.profile, file: Path) -> None:
        """Write what was recorded.

        Raises:
            OSError: the disk takes nothing more.
        """
        if self._records_memory:  # before the recording of it ends
            _written(memory_file(file), lambda path: torch.cuda.memory._dump_snapshot(str(path)))
        self._end()
        plain = temporary_name(file.with_suffix(""))
        try:
            profile.export_chrome_trace(str(plain))
            _check_whole(plain)
            _written(file, lambda path: _compress(plain, path))
        finally:
            plain.unlink(missing_ok=True)

    def _end(self) -> None:
        self._ranges.close()
        self._held.close()

    def _stop(self) -> None:
        self._end()
        self._profile, self._first, self._last = None, 0, 0

    def _wait_for_device(self) -> None:
        if self._profile_is_of_gpu:
            torch.cuda.synchronize()

    @property
    def _profile_is_of_gpu(self) -> bool:
        return self._grid.device == "cuda" and self._grid.rank in self._ranks


def activities() -> list[ProfilerActivity]:
    """Return what to profile on this machine: a torch without CUDA profiles no GPU, whatever stands in for one."""
    has_kernels = torch.cuda.is_available() and ProfilerActivity.CUDA in supported_activities()
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_kernels else [])]


def _steps(first: int, last: int) -> range:
    return range(first, last + 1)


@contextmanager
def _recorded_memory() -> Iterator[None]:
    torch.cuda.memory._record_memory_history()
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


@contextmanager
def _named_waits() -> Iterator[None]:
    """Give waiting for a collective a range of its own while the block runs: torch has one for its start alone."""

    def named(_name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with record_function(WAIT):
                return method(self, *args, **kwargs)

        return call

    with methods_replaced(dist.Work, ("wait",), named):
        yield


def _written(file: Path, write: Callable[[Path], None]) -> None:
    """Write a file under another name, and publish it once it is complete."""
    partial = temporary_name(file)
    try:
        write(partial)
        publish(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def _check_whole(trace: Path) -> None:
    """Raise OSError where torch has not written a trace to its end, of which it says nothing itself."""
    with trace.open("rb") as stream:
        stream.seek(-min(TAIL_BYTES, trace.stat().st_size), os.SEEK_END)
        if not stream.read().rstrip().endswith(b"}"):
            raise refusal_of(trace.parent) or OSError(f"torch has not written the end of {trace}")


def _compress(plain: Path, compressed: Path) -> None:
    with plain.open("rb") as source, igzip.open(compressed, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
