"""Sums and gathers through memory that ranks share: their values, and when they are left to gloo."""

import contextlib
import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from megatron_fanformer.runtime import cpu_collectives, shared_memory
from megatron_fanformer.runtime.cpu_collectives import CollectiveThroughMemory, shared_memory_collectives
from megatron_fanformer.runtime.launch import PEER_FAILURE_SIGNS
from megatron_fanformer.runtime.rank_pool import JobFailed, RankPool
from megatron_fanformer.runtime.shared_memory import PIECE_BYTES, GroupMemory
from tests.runtime.test_rank_pool import import_nothing

RunOnRanks = Callable[..., list[Any]]

MANY = PIECE_BYTES // 2 + 7  # several pieces of either type, and parts of unequal length


def operand(rank: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, whose sums are exact in any order and type."""
    return ((torch.arange(size) * (rank + 3)) % 31 - 15).to(dtype)


def sums_and_gathers(dtype: torch.dtype) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for size in (1, 1000, MANY):
        operands = torch.stack([operand(other, size, dtype) for other in range(ranks)])
        for operation, expected in ((dist.ReduceOp.SUM, operands.sum(0)), (dist.ReduceOp.MAX, operands.amax(0))):
            tensor = operands[rank].clone()
            work = dist.all_reduce(tensor, op=operation, async_op=True)
            assert isinstance(work, CollectiveThroughMemory)
            work.wait()
            assert torch.equal(tensor, expected)

        whole = torch.cat([operands[rank] + other for other in range(ranks)])
        part = torch.empty(size, dtype=dtype)
        dist.reduce_scatter_tensor(part, whole)
        assert torch.equal(part, operands.sum(0) + ranks * rank)
        own = whole.chunk(ranks)[rank]
        dist.reduce_scatter_tensor(own, whole)  # as megatron-core does with gradients
        assert torch.equal(own, part)

        gathered = torch.empty(ranks * size, dtype=dtype)
        dist.all_gather_into_tensor(gathered, operands[rank])
        assert torch.equal(gathered, operands.view(-1))
        dist.all_gather_into_tensor(whole, own)  # as it does with weights
        assert torch.equal(whole, torch.cat([operands.sum(0) + ranks * other for other in range(ranks)]))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_and_gathers(run_on_ranks: RunOnRanks, dtype: torch.dtype, ranks: int) -> None:
    run_on_ranks(ranks, sums_and_gathers, dtype)


def several_at_once() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    first, second = operand(rank, 10), operand(rank, MANY)
    with _coalescing_manager():
        dist.all_reduce(first)
        dist.all_reduce(second)
    assert torch.equal(first, sum(operand(other, 10) for other in range(ranks)))
    assert torch.equal(second, sum(operand(other, MANY) for other in range(ranks)))
    parts = [torch.empty(10), torch.empty(MANY)]
    with _coalescing_manager(async_ops=True) as works:
        for part, whole in zip(parts, (first, second), strict=True):
            dist.reduce_scatter_tensor(part, whole.repeat(ranks))
    works.wait()
    assert all(torch.equal(part, ranks * whole) for part, whole in zip(parts, (first, second), strict=True))
    wholes = [torch.empty(ranks * 10), torch.empty(ranks * MANY)]
    with _coalescing_manager(async_ops=True) as works:
        for whole, part in zip(wholes, parts, strict=True):
            dist.all_gather_into_tensor(whole, part)
    assert [type(work) for work in works.works] == [CollectiveThroughMemory]
    works.wait()
    assert all(torch.equal(whole, part.repeat(ranks)) for whole, part in zip(wholes, parts, strict=True))


def test_buckets_of_a_call(run_on_ranks: RunOnRanks) -> None:
    """megatron-core reduces and gathers all buckets of a gradient buffer as one."""
    run_on_ranks(2, several_at_once)


def rounded_sum(size: int) -> torch.Tensor:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(dist.get_rank()))
    dist.all_reduce(tensor)
    return tensor


@pytest.mark.parametrize("size", [1000, MANY])
def test_a_sum_is_the_same_on_all_ranks(run_on_ranks: RunOnRanks, size: int) -> None:
    """Otherwise the weights of data parallel ranks drift apart."""
    first, *others = run_on_ranks(3, rounded_sum, size)
    assert all(torch.equal(first, other) for other in others)


def begun_before_the_last_ended() -> None:
    rank, both = dist.get_rank(), operand(0, MANY) + operand(1, MANY)
    first, second, third = (operand(rank, MANY) for _ in range(3))
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
    assert [isinstance(work, CollectiveThroughMemory) for work in works] == [True, False]
    for work in reversed(works):
        work.wait()
    dist.all_reduce(third)
    works[0].wait()  # again
    assert all(torch.equal(tensor, both) for tensor in (first, second, third))


def test_one_that_begins_before_the_last_ended_is_left_to_gloo(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(2, begun_before_the_last_ended)


def what_gloo_does() -> None:
    rank = dist.get_rank()
    for tensor, operation, expected in (
        (torch.tensor([rank + 2]), dist.ReduceOp.SUM, [5]),
        (torch.tensor([rank + 2.0]), dist.ReduceOp.PRODUCT, [6]),
        ((torch.arange(6.0) + rank).view(2, 3).t(), dist.ReduceOp.SUM, [[1, 7], [3, 9], [5, 11]]),
    ):
        work = dist.all_reduce(tensor, op=operation, async_op=True)
        assert not isinstance(work, CollectiveThroughMemory)
        work.wait()
        assert tensor.tolist() == expected
    for whole, part in ((torch.ones(4), torch.ones(2).bfloat16()), (torch.ones(7), torch.ones(4))):
        for collective, tensors in (
            (dist.reduce_scatter_tensor, (part, whole)),
            (dist.all_gather_into_tensor, (whole, part)),
        ):
            with pytest.raises((RuntimeError, ValueError)):  # in gloo's words
                collective(*tensors)


def test_others_are_left_to_gloo(run_on_ranks: RunOnRanks) -> None:
    run_on_ranks(2, what_gloo_does)


def turned_off() -> list[bool]:
    found = []
    for enabled in (False, True):
        tensor = torch.tensor([dist.get_rank() + 2.0])
        with shared_memory_collectives(enabled=enabled):
            work = dist.all_reduce(tensor, async_op=True)
            work.wait()
        assert tensor.tolist() == [5.0]
        found.append(isinstance(work, CollectiveThroughMemory))
    return found


def test_all_are_left_to_gloo_where_they_are_turned_off(run_on_ranks: RunOnRanks) -> None:
    assert run_on_ranks(2, turned_off) == [[False, True]] * 2


def refused(rank: int, name: str) -> tuple[bool, int]:
    """A group of which one rank cannot call a function; how many descriptors it leaves open."""
    group, before = dist.new_group([0, 1]), len(os.listdir("/proc/self/fd"))
    fails = mock.patch(name, side_effect=OSError)
    with fails if dist.get_rank() == rank else contextlib.nullcontext():
        tensor = operand(dist.get_rank(), 10)
        dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, operand(0, 10) + operand(1, 10))
    return GroupMemory.of(group) is None, len(os.listdir("/proc/self/fd")) - before


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(f"{shared_memory.__name__}._map", id="another-machine"),
        "os.memfd_create",
        "os.ftruncate",  # as by ulimit -f
        "os.pipe",
    ],
)
def test_ranks_that_cannot_share_memory_are_left_to_gloo(run_on_ranks: RunOnRanks, name: str) -> None:
    assert run_on_ranks(2, refused, 1, name) == [(True, 0)] * 2


def opened() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("fanformer-rank")


def communicate_once() -> tuple[tuple[int, int], tuple[int, int]]:
    before = opened()
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)
    assert GroupMemory.of(group) is not None
    dist.destroy_process_group(group)
    del group
    return before, opened()


def test_nothing_is_left_of_a_group(run_on_ranks: RunOnRanks) -> None:
    for before, after in run_on_ranks(2, communicate_once):
        assert after[0] <= before[0]  # a connection of an earlier job may have been closing still
        assert after[1] == before[1]


def die_after_the_first(seen: Path) -> None:
    cpu_collectives.install()
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(tensor)
    except Exception as error:
        seen.write_text(str(error))
        raise


def test_a_rank_that_ends_is_noticed(tmp_path: Path) -> None:
    """As one that lost its peer, whose own error is the one to tell."""
    with RankPool(prepare=import_nothing) as pool, pytest.raises(JobFailed):
        pool.run(2, die_after_the_first, tmp_path / "seen")
    assert any(sign in (tmp_path / "seen").read_text() for sign in PEER_FAILURE_SIGNS)
