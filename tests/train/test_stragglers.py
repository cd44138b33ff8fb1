"""Which rank is named as slow, on gloo ranks whose time the test tells."""

import logging
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.runtime.parallel import rank_grid
from megatron_fanformer.train.stragglers import Stragglers

RunOnRanks = Callable[..., list[Any]]


def take_steps(
    seconds: list[float], stages: int, interval: int | None, steps: range
) -> tuple[dict[int, dict[str, float]], list[str]]:
    """The reports, by step, and what is logged of steps in which each rank computes for so many seconds."""
    now, logged = [0.0], list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_fanformer.train.stragglers")
    logger.addHandler(handler)
    reports = {}
    parallel = ParallelConfig(pipeline_model_parallel_size=stages)
    try:
        with rank_grid(parallel, "cpu") as grid, mock.patch.object(time, "perf_counter", lambda: now[0]):
            config = SimpleNamespace(finalize_model_grads_func=lambda wait: now.append(now.pop() + wait))
            stragglers = Stragglers([SimpleNamespace(config=config)], grid, interval=interval, factor=1.4)
            for step in steps:
                stragglers.begin()
                now[0] += seconds[grid.rank] * (100 if step == 7 else 1)  # a moment's disturbance
                config.finalize_model_grads_func(max(seconds) - seconds[grid.rank])
                if report := stragglers.report_if_due(step):
                    reports[step] = report
    finally:
        logger.removeHandler(handler)
    return reports, logged


def test_the_slow_rank_is_named_by_what_it_does_before_the_others_wait(run_on_ranks: RunOnRanks) -> None:
    (reports, lines), (others, nothing) = run_on_ranks(2, take_steps, [0.5, 2.0], 1, 5, range(1, 11))
    assert list(reports) == [5, 10] and reports == others and nothing == []
    for report in reports.values():
        assert report["slowest_rank"] == 1
        assert report["work_seconds/slowest"] == pytest.approx(2.0)
        assert report["work_seconds/median"] == pytest.approx(1.25)
    assert len(lines) == 2 and all("rank 1 on " in line and "4 times the median" in line for line in lines)


def test_a_rank_is_held_against_its_own_stage(run_on_ranks: RunOnRanks) -> None:
    """The second stage takes twice as long; in the first, one rank takes a fifth longer than the other."""
    (reports, lines), *_ = run_on_ranks(4, take_steps, [1.0, 1.2, 2.0, 2.1], 2, 5, range(1, 6))
    assert reports[5]["slowest_rank"] == 1 and lines == []


@pytest.mark.parametrize(("interval", "steps", "reported"), [(None, range(1, 9), []), (4, range(3, 9), [8])])
def test_nothing_is_reported_of_no_steps_or_of_the_first_few(
    run_on_ranks: RunOnRanks, interval: int | None, steps: range, reported: list[int]
) -> None:
    for reports, _ in run_on_ranks(2, take_steps, [1.0, 1.0], 1, interval, steps):
        assert list(reports) == reported
