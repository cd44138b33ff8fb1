"""Counts what a rank holds, and the bytes that its collectives move, at the process groups themselves.

Every collective of `torch.distributed`, whoever calls it and under whatever name it was imported, ends in a method of
the class ProcessGroup; while counting, those methods are replaced by ones that count and pass on. (Functional
collectives, which DTensor uses and megatron-core's training step does not, bypass them.)
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_fanformer.plan.gradient_buffers import Weight
from megatron_fanformer.plan.job import Job
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.train.optimizer import single_optimizers

# Names of megatron-core's groups, as its ProcessGroupCollection calls them; the first match names a group.
GROUPS = (
    "tp", "cp", "pp", "dp_cp", "dp", "mp", "embd", "intra_dist_opt", "pos_embd", "tp_cp", "tp_dp_cp", "intra_dp_cp",
    "inter_dist_opt",
)  # fmt: skip
# Of a training step's collectives the kind, the argument with the message, and the methods that torch.distributed's
# functions call in torch 2.10 to 2.13 (which renamed four of them). Receives are excluded: what is received was sent.
KINDS = (
    ("all-reduce", 0, "allreduce allreduce_coalesced"),
    ("all-gather", 0, "allgather allgather_coalesced _allgather_base all_gather_single"),
    ("all-gather", 0, "allgather_into_tensor_coalesced all_gather_single_coalesced"),
    ("reduce-scatter", 1, "reduce_scatter _reduce_scatter_base reduce_scatter_single"),
    ("reduce-scatter", 1, "reduce_scatter_tensor_coalesced reduce_scatter_single_coalesced"),
    ("all-to-all", 1, "alltoall alltoall_base all_to_all_single"),
    ("broadcast", 0, "broadcast"),
    ("send", 0, "send"),
)
METHODS = {method: (kind, message) for kind, message, methods in KINDS for method in methods.split()}


@dataclass(frozen=True)
class CollectiveCount:
    """Sum of this rank's collectives of one kind over one group."""

    group: str
    """Its name in `RankGrid.groups`, or `world`."""
    kind: str
    ranks: int
    calls: int
    message_bytes: int
    """Of the whole tensors: reduced, gathered (the output), scattered or exchanged (the input), broadcast or sent."""


class CollectiveCounts:
    """The counts of a `count_collectives` block, complete at its end."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels, self._totals = labels, dict[tuple[str, str, int], list[int]]()
        self.calls_seen = 0
        """Calls of any collective, those over a group of one rank included (they move nothing and are not counted)."""

    def add(self, group: dist.ProcessGroup, kind: str, message_bytes: int) -> None:
        label, ranks = self._labels.get(group.group_name) or group.group_desc, group.size()
        self.calls_seen += 1
        if ranks > 1:
            total = self._totals.setdefault((label, kind, ranks), [0, 0])
            total[0] += 1
            total[1] += message_bytes

    def lines(self) -> list[CollectiveCount]:
        return [CollectiveCount(*key, *total) for key, total in sorted(self._totals.items())]


def totals(lines: Iterable[Any]) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes by group and kind, of counted lines or the formula's."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for line in lines:
        calls, message_bytes = sums.get((line.group, line.kind), (0, 0))
        sums[line.group, line.kind] = calls + line.calls, message_bytes + line.message_bytes
    return sums


@contextmanager
def count_collectives(grid: RankGrid) -> Iterator[CollectiveCounts]:
    """Count this rank's collectives while the block runs, by group and kind. Must not be nested."""
    counts, owner = CollectiveCounts(group_labels(grid)), dist.ProcessGroup
    before = {name: vars(owner)[name] for name in METHODS if name in vars(owner)}
    for name in before:
        setattr(owner, name, counted(getattr(owner, name), *METHODS[name], counts))
    try:
        yield counts
    finally:
        for name, method in before.items():
            setattr(owner, name, method)  # the class's own: one that was looked up no longer binds to an object


def bytes_of(message: Any) -> int:
    """The bytes of a tensor, or of nested lists of tensors."""
    return message.nbytes if isinstance(message, torch.Tensor) else sum(bytes_of(part) for part in message)


def counted(method: Callable[..., Any], kind: str, message: int, counts: CollectiveCounts) -> Callable[..., Any]:
    def count_and_call(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        counts.add(self, kind, bytes_of((*args, *kwargs.values())[message]))
        return method(self, *args, **kwargs)

    return count_and_call


def group_labels(grid: RankGrid) -> dict[str, str]:
    """The labels of the groups by torch's own unique names: several groups may have the same ranks."""
    assert dist.group.WORLD is not None
    labels: dict[str, str] = {dist.group.WORLD.group_name: "world"}
    for label in GROUPS:
        group = getattr(grid.groups, label, None)
        if isinstance(group, dist.ProcessGroup):
            labels.setdefault(group.group_name, label)
    labels.setdefault(grid.samples_group.group_name, "tp_cp")  # on GPUs, one of its own for the same ranks
    return labels


def held_weights(chunk: torch.nn.Module, is_sequence_parallel: bool) -> list[Weight]:
    return [
        Weight(
            re.sub(r"^decoder\.layers\.\d+\.", "", name),
            parameter.numel(),
            is_sequence_parallel and getattr(parameter, "sequence_parallel", False),
            getattr(parameter, "shared_embedding", False),
        )
        for name, parameter in chunk.named_parameters()
    ]


def held_states(wrapped: list[Any], optimizer: Any, job: Job) -> dict[str, int]:
    parameters = [weight for chunk in wrapped for weight in chunk.parameters()]
    buffers = [buffer for chunk in wrapped for buffer in chunk.buffers]
    updated = [weight for group in optimizer.param_groups for weight in group["params"]]
    states = [state for part in single_optimizers(optimizer) for state in part.optimizer.state.values()]
    values = [value for state in states for value in state.values()]
    held = [buffer.param_data for buffer in buffers] if job.parallel.use_distributed_optimizer else parameters
    return {
        "weights": sum(weight.nbytes for weight in held),
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "main weights": sum(weight.nbytes for weight in updated) if job.precision.dtype == "bf16" else 0,
        "moments": sum(value.nbytes for value in values if isinstance(value, torch.Tensor) and value.ndim),
    }
