"""Finds the rank that all others wait for: own work and waiting by rank, measured in a few steps of every hundred.

Waiting is measured where collectives begin and end: at the process groups and at their work. What a rank's step takes
beyond that is its own work. A rank that is slower than the others waits less than they do.

On a CPU the caller waits, and a clock says how long. On a GPU the caller goes on, and the stream of the computation
waits: a pair of events on it around each collective, and around each wait for one, says how long it stood still, be it
for a peer or for the bytes. What overlaps with computation costs neither.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime.collective_methods import COLLECTIVES, methods_replaced
from megatron_fanformer.runtime.config import DeviceKind
from megatron_fanformer.runtime.cpu_collectives import CollectiveThroughMemory
from megatron_fanformer.runtime.parallel import RankGrid

MEASURED_STEPS = 4  # before each report; the median of them, for any single step may be disturbed
LEAST_LOSS = 0.1  # of a step: what the others wait for a rank that is named; below, a disturbed machine is as likely

# Messages of a pipeline are received, too, and several may be sent as one.
_CALLS = (*COLLECTIVES, "recv", "recv_anysource", "_end_coalescing")

logger = logging.getLogger(__name__)


class RankTime(NamedTuple):
    """A rank's share of a step, in seconds."""

    work: float
    """Its own work, in seconds: the step without `wait`."""
    wait: float
    """Its wait for other ranks and for their bytes, in collectives."""
    stage: float
    """Number of its pipeline stage: ranks of other stages have other work."""


class Slowest(NamedTuple):
    """The rank that is slowest beside the others of its pipeline stage."""

    rank: int
    usual: float
    """The median of its stage, in seconds of own work."""
    factor: float
    """Its own work divided by that."""
    loss: float
    """Its work beyond that, as a share of a step: the time that the others wait for it."""


def find_slowest(times: Sequence[RankTime]) -> Slowest:
    """Return the slowest of all ranks, given in their order. It takes the lower of two medians: with two ranks, one is
    slow.
    """
    usual = {
        stage: statistics.median_low(time.work for time in times if time.stage == stage)
        for stage in {time.stage for time in times}
    }
    factors = [time.work / max(usual[time.stage], 1e-9) for time in times]
    rank = max(range(len(times)), key=factors.__getitem__)
    work, wait, stage = times[rank]
    loss = (work - usual[stage]) / max(work + wait, 1e-9)
    return Slowest(rank, usual[stage], factors[rank], loss)


class Stragglers:
    """Measures work and waiting of this rank; every rank has one.

    Args:
        interval: steps from one report to the next; None: nothing is measured.
        factor: of the median, beyond which the slowest rank is named in the log.
    """

    def __init__(self, grid: RankGrid, *, interval: int | None, factor: float) -> None:
        self._grid, self._factor = grid, factor
        self._interval = interval if grid.world_size > 1 else None
        self._taken: dict[int, RankTime] = {}  # by step: one that is taken again counts once

    @contextmanager
    def measuring(self, step: int) -> Iterator[None]:
        """Measure a training step; costs nothing in steps that are not due."""
        if self._interval is None or -step % self._interval >= MEASURED_STEPS:
            yield
            return
        began = time.perf_counter()
        with timed_waits(self._grid.device) as waits:
            yield
            waited = waits.seconds()
        taken = time.perf_counter() - began
        self._taken[step] = RankTime(max(0.0, taken - waited), waited, self._grid.groups.pp.rank())

    def forget(self, step: int) -> None:
        """Leave out a step that was skipped: it is not like the others."""
        self._taken.pop(step, None)

    def report_if_due(self, step: int) -> dict[str, float]:
        """Return the metrics of the steps measured before this one, if a report is due at it; a collective call then.

        None where fewer were measured than are to be: the first ones after a start are slow.
        """
        if self._interval is None or step % self._interval:
            return {}
        taken = list(self._taken.values())
        self._taken.clear()
        if len(taken) < min(MEASURED_STEPS, self._interval):
            return {}
        own = RankTime(*(statistics.median(values) for values in zip(*taken, strict=True)))
        logger.debug("step %d  own work %.4g s, waiting for other ranks %.4g s", step, own.work, own.wait)
        numbers = torch.empty(self._grid.world_size * len(own), dtype=torch.float64, device=self._grid.torch_device)
        dist.all_gather_into_tensor(numbers, torch.tensor(own, dtype=torch.float64, device=self._grid.torch_device))
        times = [RankTime(*row) for row in numbers.view(-1, len(own)).tolist()]
        slowest = find_slowest(times)
        if slowest.factor > self._factor and slowest.loss > LEAST_LOSS:
            self._name(step, slowest, times[slowest.rank].work)
        return {
            "work_seconds/median": statistics.median(time.work for time in times),
            "work_seconds/slowest": times[slowest.rank].work,
            "wait_seconds/median": statistics.median(time.wait for time in times),
            "wait_seconds/slowest": times[slowest.rank].wait,
            "slowest_rank": slowest.rank,
        }

    def _name(self, step: int, slowest: Slowest, work: float) -> None:
        host = [devices.node_name()]
        dist.broadcast_object_list(host, src=slowest.rank)
        if self._grid.is_main:
            logger.warning(
                "step %d  rank %d on %s holds up the others: %.4g s of own work a step, %.3g times the median of its "
                "stage (%.4g s), which is %.0f%% of a step; see whether that node is healthy (examples/check_nodes.py)",
                step,
                slowest.rank,
                host[0],
                work,
                slowest.factor,
                slowest.usual,
                100 * slowest.loss,
            )


# -- waiting


class Waits:
    """The waits of a `timed_waits` block."""

    def __init__(self, device: DeviceKind) -> None:
        self._on_gpu = device == "cuda"
        self._host_seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def one(self) -> Iterator[None]:
        """Time a call that may wait."""
        if not self._on_gpu:
            began = time.perf_counter()
            yield
            self._host_seconds += time.perf_counter() - began
        elif torch.cuda.is_current_stream_capturing():
            yield
        else:
            began_event, ended_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began_event.record()
            yield
            ended_event.record()
            self._events.append((began_event, ended_event))

    def seconds(self) -> float:
        """Return the seconds of all of them together; wait for the device."""
        for _, ended in self._events:  # they may be on several streams
            ended.synchronize()
        return self._host_seconds + sum(began.elapsed_time(ended) for began, ended in self._events) / 1000


@contextmanager
def timed_waits(device: DeviceKind) -> Iterator[Waits]:
    """Measure how long this process waits in collectives while the block runs. Must not be nested."""
    waits = Waits(device)

    def timed(_name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with waits.one():
                return method(self, *args, **kwargs)

        return call

    with (
        methods_replaced(dist.ProcessGroup, _CALLS, timed),
        methods_replaced(dist.Work, ("wait",), timed),
        methods_replaced(CollectiveThroughMemory, ("wait",), timed),
    ):
        yield waits
