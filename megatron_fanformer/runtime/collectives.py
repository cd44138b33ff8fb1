"""Counts the bytes that collectives move, at the process groups themselves.

Every collective of `torch.distributed`, whoever calls it and under whatever name it was imported, ends in a method of
the class ProcessGroup; while counting, those methods are replaced by ones that count and pass on. (Functional
collectives, which DTensor uses and megatron-core's training step does not, bypass them.)
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

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


# Kind and argument with the message, by the methods that torch.distributed's functions call in torch 2.10 to 2.13
# (which renamed four of them). Receives are excluded: what is received was sent.
METHODS: dict[str, tuple[Kind, int]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), ("all-reduce", 0)),
    **dict.fromkeys(
        (
            *("allgather", "allgather_coalesced", "_allgather_base", "all_gather_single"),
            *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        ),
        ("all-gather", 0),
    ),
    **dict.fromkeys(
        (
            *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
            *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
        ),
        ("reduce-scatter", 1),
    ),
    **dict.fromkeys(("alltoall", "alltoall_base", "all_to_all_single"), ("all-to-all", 1)),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "send": ("send", 0),
    **dict.fromkeys(("barrier", "monitored_barrier"), ("barrier", 0)),
}
SHARDS = ("gather", "scatter")
"""Kinds whose argument is one rank's part of the message."""


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
        self._totals: dict[tuple[str, Kind, int], list[int]] = {}  # calls and bytes
        self._lock = threading.Lock()  # backward of GPU tensors runs in a thread of its own
        self.calls_seen = 0
        """Calls of any collective, those over a group of one rank included (they move nothing and are not counted)."""

    def add(self, group: dist.ProcessGroup, kind: Kind, message_bytes: int) -> None:
        """Count one call."""
        label, ranks = self._labels.get(group.group_name) or group.group_desc, group.size()
        with self._lock:
            self.calls_seen += 1
            if ranks > 1:
                total = self._totals.setdefault((label, kind, ranks), [0, 0])
                total[0] += 1
                total[1] += message_bytes

    def lines(self) -> list[CollectiveCount]:
        """Return the counts, by group and kind."""
        return [
            CollectiveCount(group=group, kind=kind, ranks=ranks, calls=calls, message_bytes=size)
            for (group, kind, ranks), (calls, size) in sorted(self._totals.items())
        ]


@contextmanager
def count_collectives(grid: RankGrid) -> Iterator[CollectiveCounts]:
    """Count the bytes of this rank's collectives while the block runs, by group and kind.

    Must not be nested.
    """
    counts, owner = CollectiveCounts(_labels(grid)), dist.ProcessGroup
    before = {name: vars(owner)[name] for name in METHODS if name in vars(owner)}
    for name in before:
        setattr(owner, name, _counted(getattr(owner, name), *METHODS[name], counts))
    try:
        yield counts
    finally:
        for name, method in before.items():
            setattr(owner, name, method)  # the class's own: one that was looked up no longer binds to an object


def _bytes_of(message: Any) -> int:
    """Return the bytes of a tensor, or of nested lists of tensors."""
    return message.nbytes if isinstance(message, torch.Tensor) else sum(_bytes_of(part) for part in message)


def moved_bytes(kind: str, message_bytes: float, ranks: int) -> float:
    """Return the bytes that one of `ranks` ranks sends for a message by the best algorithm, a ring.

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


def _counted(method: Callable[..., Any], kind: Kind, message: int, counts: CollectiveCounts) -> Callable[..., Any]:
    def counted(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        size = 0 if kind == "barrier" else _bytes_of((*args, *kwargs.values())[message])
        counts.add(self, kind, size * (self.size() if kind in SHARDS else 1))
        return method(self, *args, **kwargs)

    return counted


def _labels(grid: RankGrid) -> dict[str, str]:
    """Return the labels of the groups by torch's own unique names: several groups may have the same ranks."""
    assert dist.group.WORLD is not None
    labels: dict[str, str] = {dist.group.WORLD.group_name: WORLD}
    for label in _GROUPS:
        group = getattr(grid.groups, label, None)
        if isinstance(group, dist.ProcessGroup):
            labels.setdefault(group.group_name, label)
    labels.setdefault(grid.samples_group.group_name, "tp_cp")  # on GPUs, one of its own for the same ranks
    return labels
