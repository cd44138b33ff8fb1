"""The count of collectives: each kind, and that nothing is left behind."""

from typing import Any

import torch
import torch.distributed as dist

from megatron_fanformer.runtime.parallel import RankGrid, rank_grid
from tests.plan.collectives import count_collectives
from tests.train.layouts import layout

Count = tuple[str, str, int, int]  # group, kind, calls, bytes


def communicate(grid: RankGrid, group: dist.ProcessGroup) -> None:
    """Every collective of a training step, of ten float32 numbers a rank (all-reduce: twenty), and a send of five."""
    n, rank = group.size(), group.rank()
    part, whole = torch.zeros(10), torch.zeros(10 * n)
    dist.all_reduce(whole, group=group)
    dist.all_gather(list(whole.chunk(n)), part, group=group)
    dist.all_gather_into_tensor(whole, part, group=group)
    dist.reduce_scatter_tensor(part, whole, group=group)
    dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
    dist.broadcast(part, group_src=0, group=group)
    dist.reduce(part, group_dst=0, group=group)
    dist.barrier(group)
    if n > 1 and rank == 0:
        dist.send(torch.zeros(5), group_dst=1, group=group)
    elif n > 1:
        dist.recv(torch.zeros(5), group_src=0, group=group)
    for same in (grid.groups.mp, grid.groups.intra_dist_opt, dist.group.WORLD):  # they are told apart
        dist.all_reduce(torch.zeros(1), group=same)


def count(degrees: dict[str, Any]) -> tuple[set[Count], int]:
    with rank_grid(layout(**degrees), "cpu") as grid:
        with count_collectives(grid) as counts:
            communicate(grid, grid.groups.tp)
        communicate(grid, grid.groups.tp)  # no longer counted
        return {(line.group, line.kind, line.calls, line.message_bytes) for line in counts.lines()}, counts.calls_seen


def test_each_kind_is_counted_by_its_whole_tensor(run_on_ranks: Any) -> None:
    (first, first_seen), (second, second_seen) = run_on_ranks(2, count, dict(tensor_model_parallel_size=2))
    assert second == {  # what it received, the other one sent
        ("tp", "all-gather", 2, 160),
        ("tp", "all-reduce", 1, 80),
        ("tp", "all-to-all", 1, 80),
        ("tp", "barrier", 1, 0),
        ("tp", "broadcast", 1, 40),
        ("tp", "reduce", 1, 40),
        ("tp", "reduce-scatter", 1, 80),
        *((group, "all-reduce", 1, 4) for group in ("mp", "intra_dist_opt", "world")),
    }
    assert first == second | {("tp", "send", 1, 20)}
    assert (first_seen, second_seen) == (12, 11)


def test_a_group_of_one_rank_moves_nothing(run_on_ranks: Any) -> None:
    for lines, seen in run_on_ranks(2, count, dict(data_parallel_size=2)):
        assert seen == 11 and {group for group, *_ in lines} == {"intra_dist_opt", "world"}
