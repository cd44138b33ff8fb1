"""Own work and waiting of ranks, measured on gloo ranks of which one is slow, and which rank is then named."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist

from megatron_fanformer.runtime.collective_methods import methods_replaced
from megatron_fanformer.runtime.cpu_collectives import CollectiveThroughMemory
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.runtime.parallel import rank_grid
from megatron_fanformer.training.stragglers import (
    _CALLS,
    MEASURED_STEPS,
    RankTime,
    Slowest,
    Stragglers,
    find_slowest,
    timed_waits,
)

SLOW_RANK = 1
SLOW_SECONDS, USUAL_SECONDS = 0.06, 0.01


def test_a_rank_is_held_against_its_own_stage() -> None:
    """The second stage has twice the work; in the first, rank 2 takes half as long again as the others."""
    work = [1.0, 1.1, 1.5, 0.9, 2.0, 2.1, 2.2, 2.0]
    times = [RankTime(seconds, 0.0, stage=rank // 4) for rank, seconds in enumerate(work)]
    assert find_slowest(times) == Slowest(2, 1.0, 1.5, loss=0.5 / 1.5)
    assert find_slowest([RankTime(1.0, 1.5, 0), RankTime(1.5, 1.0, 0)]) == Slowest(1, 1.0, 1.5, loss=0.5 / 2.5)
    assert find_slowest([RankTime(1.0, 0.5, 0), RankTime(9.0, 0.0, 1)]).factor == 1.0  # alone in their stages


class Clock:
    """A rank's time, which only work and collectives let pass: the former as stated, the latter until all are there."""

    def __init__(self, rank: int) -> None:
        self.now, self._rank, self._meetings = 0.0, rank, 0

    def __call__(self) -> float:
        return self.now

    def meet(self, _name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            store, self._meetings = dist.distributed_c10d._get_default_store(), self._meetings + 1
            store.set(f"clock-{self._rank}-{self._meetings}", str(self.now))
            self.now = max(self.now, float(store.get(f"clock-{1 - self._rank}-{self._meetings}")))
            return result

        return call


@contextmanager
def clock_of_two(rank: int) -> Iterator[Clock]:
    clock = Clock(rank)
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(time, "perf_counter", clock))
        for kind, names in ((dist.ProcessGroup, _CALLS), (dist.Work, ("wait",)), (CollectiveThroughMemory, ("wait",))):
            patches.enter_context(methods_replaced(kind, names, clock.meet))
        yield clock


def take_steps(steps: int, interval: int | None) -> tuple[list[dict[str, float]], list[str]]:
    """Steps of nothing but work, of which one rank has more, and the kinds of collective that a step has."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_fanformer.training.stragglers")
    logger.addHandler(handler)
    reports = []
    try:
        with rank_grid(ParallelConfig(), "cpu") as grid, clock_of_two(grid.rank) as clock:
            stragglers = Stragglers(grid, interval=interval, factor=2.0)
            for step in range(1, steps + 1):
                with stragglers.measuring(step):
                    clock.now += SLOW_SECONDS if grid.rank == SLOW_RANK else USUAL_SECONDS
                    dist.all_reduce(torch.ones(2))
                    other = 1 - grid.rank
                    sent = dist.P2POp(dist.isend, torch.ones(2), other)
                    received = dist.P2POp(dist.irecv, torch.ones(2), other)
                    for work in dist.batch_isend_irecv([sent, received]):
                        work.wait()
                reports.append(stragglers.report_if_due(step))
    finally:
        logger.removeHandler(handler)
    return reports, [line for line in logged if "holds up" in line]


def test_the_slow_rank_is_named_by_what_it_does_itself(run_on_ranks: Callable[..., list[Any]]) -> None:
    """Its step takes no longer than the other's, which waits for it."""
    (reports, message), (others, nothing) = run_on_ranks(2, take_steps, 8, 4)
    assert [bool(report) for report in reports] == [step % 4 == 0 for step in range(1, 9)]
    assert reports == others and nothing == []
    for report in filter(None, reports):
        assert report["slowest_rank"] == SLOW_RANK
        assert report["work_seconds/slowest"] == pytest.approx(SLOW_SECONDS)
        assert report["work_seconds/median"] == pytest.approx((SLOW_SECONDS + USUAL_SECONDS) / 2)
        assert report["wait_seconds/slowest"] == pytest.approx(0.0, abs=1e-9)
        assert report["wait_seconds/median"] == pytest.approx((SLOW_SECONDS - USUAL_SECONDS) / 2)
    assert len(message) == 2 and all(f"rank {SLOW_RANK} on " in line for line in message)


def count_wrapped(steps: int, interval: int | None) -> int:
    with rank_grid(ParallelConfig(), "cpu") as grid:
        stragglers, wrapped = Stragglers(grid, interval=interval, factor=2.0), 0
        for step in range(1, steps + 1):
            before = dist.Work.wait
            with stragglers.measuring(step):
                wrapped += dist.Work.wait is not before
            assert dist.Work.wait is before
            stragglers.report_if_due(step)
    return wrapped


@pytest.mark.parametrize(("interval", "measured"), [(20, 2 * MEASURED_STEPS), (2, 40), (None, 0)])
def test_few_steps_are_measured(run_on_ranks: Callable[..., list[Any]], interval: int | None, measured: int) -> None:
    assert run_on_ranks(2, count_wrapped, 40, interval) == [measured] * 2


def resume_skip_and_go_back() -> list[list[int]]:
    """The numbers of steps that reports are of."""
    reported = []
    with rank_grid(ParallelConfig(), "cpu") as grid:
        stragglers = Stragglers(grid, interval=10, factor=2.0)
        for step in (8, 9, 10, *range(11, 21), 27, 28, 29, 26, 27, 28, 29, 30, *range(31, 41)):
            with stragglers.measuring(step):
                pass
            if step == 39:
                stragglers.forget(step)
            taken = sorted(stragglers._taken)
            if stragglers.report_if_due(step):
                reported.append(taken)
            assert not (step % 10 == 0 and stragglers._taken)
    return reported


def test_a_report_is_of_as_many_whole_steps_as_it_says(run_on_ranks: Callable[..., list[Any]]) -> None:
    """Not after a resume at step 8, nor where one of them was skipped; those of a pass that was given up count once."""
    assert run_on_ranks(2, resume_skip_and_go_back) == [[[17, 18, 19, 20], [27, 28, 29, 30]]] * 2


def test_what_is_not_a_collective_is_no_wait() -> None:
    with timed_waits("cpu") as waits:
        time.sleep(USUAL_SECONDS)
    assert waits.seconds() == 0.0
