"""Remembers the last collectives that this rank has entered, by group, for the report of a hang (`hang_report.py`).

A collective waits for all ranks of its group. So which rank is missing shows in how many each has entered: the ranks of
a group enter the same ones in the same order. A message between two ranks is one of a group of the two, in each
direction. What a CUDA graph replays enters nothing here; NCCL's own recorder has it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_fanformer.runtime.collective_methods import METHODS, bytes_of, methods_replaced

KEPT = 64  # of a group
RECEIVE = "recv"
# By the descriptions that torch and megatron-core give their groups, as ProcessGroupCollection calls them.
LABELS = {
    "default_pg": "world",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "MODEL_PARALLEL_GROUP": "mp",
    "EMBEDDING_GROUP": "embd",
    "POSITION_EMBEDDING_GROUP": "pos_embd",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1": "inter_dist_opt",  # without experts, that group serves
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
}


class Entered(NamedTuple):
    """A collective that this rank has entered."""

    number: int
    """From 1, in its group."""
    kind: str
    message_bytes: int
    at: float
    """Seconds since 1970."""


class GroupRecord:
    """The last collectives of a group.

    Args:
        name: the group's, the same on all of its ranks.
        label: what it is called in messages.
    """

    def __init__(self, name: str, label: str, ranks: list[int]) -> None:
        self.name, self.label, self.ranks = name, label, ranks
        self.count = 0
        self.last: deque[Entered] = deque(maxlen=KEPT)

    def enter(self, kind: str, message_bytes: int) -> None:
        """Note a collective that begins."""
        self.count += 1
        self.last.append(Entered(self.count, kind, message_bytes, time.time()))


_records: dict[tuple[dist.ProcessGroup, str], GroupRecord] = {}
"""By group, and for messages by their direction."""


@contextmanager
def remembering_collectives() -> Iterator[None]:
    """Remember what this rank enters while the block runs; must not be nested."""
    names = (*METHODS, RECEIVE)
    try:
        with methods_replaced(dist.ProcessGroup, names, _remembering):
            yield
    finally:
        _records.clear()  # which would keep the groups


def records() -> list[GroupRecord]:
    """Return what is remembered of each group; of another thread's present, too."""
    return list(_records.values())


def _remembering(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    if name in ("send", RECEIVE):

        def send_or_receive(group: dist.ProcessGroup, tensors: Any, peer: int, *rest: Any, **named: Any) -> Any:
            pair = (group.rank(), peer) if name == "send" else (peer, group.rank())
            _record(group, pair).enter("message", bytes_of(tensors))
            return method(group, tensors, peer, *rest, **named)

        return send_or_receive
    kind, message = METHODS[name].kind, METHODS[name].message

    def collective(group: dist.ProcessGroup, *arguments: Any, **named: Any) -> Any:
        record = _records.get((group, "")) or _record(group)
        size = bytes_of(arguments[message]) if message is not None and message < len(arguments) else 0
        record.enter(kind, size)
        return method(group, *arguments, **named)

    return collective


def _record(group: dist.ProcessGroup, pair: tuple[int, int] | None = None) -> GroupRecord:
    """Return a group's record; of the messages between two of its ranks if they are given, by their places in it."""
    direction = "" if pair is None else f"{pair[0]} to {pair[1]}"
    if (found := _records.get((group, direction))) is None:
        ranks = dist.get_process_group_ranks(group)
        label = LABELS.get(group.group_desc, group.group_desc)
        if pair is not None:
            ranks = [ranks[place] for place in pair]
            label = f"{label} from rank {ranks[0]} to {ranks[1]}"
        name = f"{group.group_name} {direction}".strip()
        found = _records.setdefault((group, direction), GroupRecord(name, label, ranks))
    return found
