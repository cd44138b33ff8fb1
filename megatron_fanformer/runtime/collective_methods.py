"""The methods of process groups that are collectives, and how they are replaced while something looks at them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch

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


def bytes_of(message: Any) -> int:
    """Return the bytes of a tensor, or of nested lists of tensors."""
    return message.nbytes if isinstance(message, torch.Tensor) else sum(bytes_of(part) for part in message)
