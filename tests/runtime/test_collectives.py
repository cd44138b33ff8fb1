"""The count of collectives: each kind, and that nothing is left behind."""

from typing import Any

import torch
import torch.distributed as dist

from megatron_fanformer.runtime.collectives import count_collectives, moved_bytes
from megatron_fanformer.runtime.parallel import RankGrid, rank_grid
from tests.train.layouts import layout

Count = tuple[str, str, int, int]  # group, kind, calls, bytes


def communicate(grid: RankGrid, group: dist.ProcessGroup) -> None:
    """Every collective that gloo has, of ten float32 numbers a rank (all-reduce: twenty), and a send of five."""
    n, rank = group.size(), group.rank()
    part, whole = torch.zeros(10), torch.zeros(10 * n)
    parts = list(whole.chunk(n))
    dist.all_reduce(whole, group=group)
    dist.all_gather(parts, part, group=group)
    dist.all_gather_into_tensor(whole, part, group=group)
    dist.reduce_scatter_tensor(part, whole, group=group)
    dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
    dist.broadcast(part, group_src=0, group=group)
    dist.reduce(part, group_dst=0, group=group)
    dist.gather(part, parts if rank == 0 else None, group_dst=0, group=group)
    dist.scatter(part, parts if rank == 0 else None, group_src=0, group=group)
    dist.barrier(group)
    if n > 1 and rank == 0:
        dist.send(torch.zeros(5), group_dst=1, group=group)
    elif n > 1:
        dist.recv(torch.zeros(5), group_src=0, group=group)


def count(degrees: dict[str, Any]) -> tuple[list[Count], int]:
    with rank_grid(layout(**degrees), "cpu") as grid:
        with count_collectives(grid) as counts:
            communicate(grid, grid.groups.tp)
        communicate(grid, grid.groups.tp)  # no longer counted
        return [(line.group, line.kind, line.calls, line.message_bytes) for line in counts.lines()], counts.calls_seen


EXPECTED = {
    ("tp", "all-gather", 2, 160),
    ("tp", "all-reduce", 1, 80),
    ("tp", "all-to-all", 1, 80),
    ("tp", "barrier", 1, 0),
    ("tp", "broadcast", 1, 40),
    ("tp", "gather", 1, 80),
    ("tp", "reduce", 1, 40),
    ("tp", "reduce-scatter", 1, 80),
    ("tp", "scatter", 1, 80),
}


def test_each_kind_is_counted_by_its_whole_tensor(run_on_ranks: Any) -> None:
    (first, first_seen), (second, second_seen) = run_on_ranks(2, count, dict(tensor_model_parallel_size=2))
    assert set(first) == EXPECTED | {("tp", "send", 1, 20)}
    assert set(second) == EXPECTED  # what it received, the other one sent
    assert (first_seen, second_seen) == (11, 10)


def test_a_group_of_one_rank_moves_nothing(run_on_ranks: Any) -> None:
    for lines, seen in run_on_ranks(2, count, dict(data_parallel_size=2)):
        assert (lines, seen) == ([], 10)


def groups_of_the_same_ranks() -> list[str]:
    with rank_grid(layout(tensor_model_parallel_size=2), "cpu") as grid:
        groups = grid.groups
        with count_collectives(grid) as counts:
            for group in (groups.tp, groups.mp, groups.intra_dist_opt, dist.group.WORLD):
                dist.all_reduce(torch.zeros(1), group=group)
        return [line.group for line in counts.lines()]


def test_groups_of_the_same_ranks_are_told_apart(run_on_ranks: Any) -> None:
    assert run_on_ranks(2, groups_of_the_same_ranks) == [["intra_dist_opt", "mp", "tp", "world"]] * 2


def test_what_a_rank_of_a_ring_sends() -> None:
    parts = dict.fromkeys(("all-gather", "reduce-scatter", "all-to-all"), 75.0)
    expected = {"all-reduce": 150.0, **parts, "send": 100.0, "broadcast": 100.0}
    assert {kind: moved_bytes(kind, 100, ranks=4) for kind in expected} == expected
    assert {moved_bytes(kind, 100, ranks=1) for kind in expected} == {0}
