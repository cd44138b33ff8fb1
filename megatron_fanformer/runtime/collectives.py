"""Counts the bytes that collectives move, at the process groups themselves.

Every collective of `torch.distributed`, whoever calls it and under whatever name it was imported, ends in a method of
the class ProcessGroup; while counting, those methods are replaced by ones that count and pass on. (Functional
collectives, which DTensor uses and megatron-core's training step does not, bypass them.)
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from megatron_fanformer.runtime.parallel import RankGrid

# Names of megatron-core's groups, as its ProcessGroupCollection calls them; the first match names a group.
_GROUPS = (
    "tp", "cp", "pp", "dp_cp", "dp", "mp", "embd", "intra_dist_opt", "pos_embd", "tp_cp", "tp_dp_cp", "intra_dp_cp",
    "inter_dist_opt",
)  # fmt: skip
WORLD = "world"

Kind = Literal[
    "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "reduce", "gather", "scatter", "send",
    "barrier",
]  # fmt: skip


class Method(NamedTuple):
    """A method that is a collective."""

    kind: Kind
    message: int | None
    """Argument that holds the message; None where there is none."""
    is_shard: bool = False
    """Whether that argument is one rank's part of it."""


# The methods that torch.distributed's functions call, in torch 2.10 to 2.13 (which renamed four of them). Receives are
# excluded: what is received was sent.
METHODS: dict[str, Method] = {
    "allreduce": Method("all-reduce", 0),
    "allreduce_coalesced": Method("all-reduce", 0),
    "allgather": Method("all-gather", 0),
    "allgather_coalesced": Method("all-gather", 0),
    "_allgather_base": Method("all-gather", 0),
    "all_gather_single": Method("all-gather", 0),
    "allgather_into_tensor_coalesced": Method("all-gather", 0),
    "all_gather_single_coalesced": Method("all-gather", 0),
    "reduce_scatter": Method("reduce-scatter", 1),
    "_reduce_scatter_base": Method("reduce-scatter", 1),
    "reduce_scatter_single": Method("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced": Method("reduce-scatter", 1),
    "reduce_scatter_single_coalesced": Method("reduce-scatter", 1),
    "alltoall": Method("all-to-all", 1),
    "alltoall_base": Method("all-to-all", 1),
    "all_to_all_single": Method("all-to-all", 1),
    "broadcast": Method("broadcast", 0),
    "reduce": Method("reduce", 0),
    "gather": Method("gather", 1, is_shard=True),
    "scatter": Method("scatter", 0, is_shard=True),
    "send": Method("send", 0),
    "barrier": Method("barrier", None),
    "monitored_barrier": Method("barrier", None),
}


@dataclass(frozen=True, kw_only=True)
class CollectiveCount:
    """Sum of this rank's collectives of one kind over one group."""

    group: str
    """Name of the group in `RankGrid.groups` (dp_cp: the data parallel ranks, context parallel ones included), or
    `world`."""
    kind: Kind
    ranks: int
    """Ranks of the group."""
    calls: int
    message_bytes: int
    """Bytes of the whole tensors: reduced, gathered (the output), scattered or exchanged (the input), broadcast or
    sent."""


class CollectiveCounts:
    """The counts of a `count_collectives` block, complete at its end."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._totals: dict[tuple[str, Kind], CollectiveCount] = {}
        self._lock = threading.Lock()  # backward of GPU tensors runs in a thread of its own
        self.calls_seen = 0
        """Calls of any collective, those over a group of one rank included (they move nothing and are not counted)."""

    def add(self, group: dist.ProcessGroup, kind: Kind, message_bytes: int) -> None:
        """Count one call."""
        label, ranks = self._labels.get(group.group_name) or group.group_desc, group.size()
        with self._lock:
            self.calls_seen += 1
            if ranks == 1:
                return
            before = self._totals.get((label, kind))
            self._totals[label, kind] = CollectiveCount(
                group=label,
                kind=kind,
                ranks=ranks,
                calls=1 + (before.calls if before else 0),
                message_bytes=message_bytes + (before.message_bytes if before else 0),
            )

    def lines(self) -> list[CollectiveCount]:
        """Return the counts, by group and kind."""
        return [self._totals[key] for key in sorted(self._totals)]


@contextmanager
def count_collectives(grid: RankGrid) -> Iterator[CollectiveCounts]:
    """Count what this rank's collectives move while the block runs, by group and kind.

    Must not be nested.
    """
    counts = CollectiveCounts(_labels(grid))
    with methods_replaced(dist.ProcessGroup, METHODS, lambda name, method: _counted(method, METHODS[name], counts)):
        yield counts


@contextmanager
def methods_replaced(
    owner: Any, names: Iterable[str], replacement: Callable[[str, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replace methods of a class while the block runs.

    Args:
        names: those that the class itself does not have are left out.
        replacement: a method's, by its name and itself.
    """
    before = {name: vars(owner)[name] for name in names if name in vars(owner)}
    for name in before:
        setattr(owner, name, replacement(name, getattr(owner, name)))
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(owner, name, method)  # the class's own: one that was looked up no longer binds to an object


def _bytes_of(message: Any) -> int:
    """Return the bytes of a tensor, or of nested lists of tensors."""
    return message.nbytes if isinstance(message, torch.Tensor) else sum(_bytes_of(part) for part in message)


def moved_bytes(kind: str, message_bytes: float, ranks: int) -> float:
    """Return what one of `ranks` ranks sends for a message by the best algorithm, a ring in which each sends as much.

    The factors are those of the bus bandwidth in NVIDIA's nccl-tests (doc/PERFORMANCE.md): an all-gather, a
    reduce-scatter and an all-to-all send (n - 1) / n of the whole tensor, an all-reduce, which is the first two, twice
    that. Where ranks differ it is the most that one sends or receives: for a broadcast or a reduction to one rank
    the whole tensor, for a gather or a scatter (n - 1) / n of it. A send moves the tensor.
    """
    if ranks == 1:
        return 0.0
    share = (ranks - 1) / ranks
    factors = dict.fromkeys(("all-gather", "reduce-scatter", "all-to-all", "gather", "scatter"), share)
    return (factors | {"all-reduce": 2 * share}).get(kind, 1.0) * message_bytes


def _counted(method: Callable[..., Any], description: Method, counts: CollectiveCounts) -> Callable[..., Any]:
    def counted(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        size = 0
        if description.message is not None:
            size = _bytes_of((*args, *kwargs.values())[description.message])
            size *= self.size() if description.is_shard else 1
        counts.add(self, description.kind, size)
        return method(self, *args, **kwargs)

    return counted


def _labels(grid: RankGrid) -> dict[str, str]:
    """Group name (unique, torch's own) -> what the group is: several may have the same ranks."""
    assert dist.group.WORLD is not None
    labels: dict[str, str] = {dist.group.WORLD.group_name: WORLD}
    for label in _GROUPS:
        group = getattr(grid.groups, label, None)
        if isinstance(group, dist.ProcessGroup):
            labels.setdefault(group.group_name, label)
    labels.setdefault(grid.samples_group.group_name, "tp_cp")  # on GPUs, one of its own for the same ranks
    return labels
