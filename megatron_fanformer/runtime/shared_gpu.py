"""Ranks that share a GPU, over gloo: NCCL wants one a rank.

gloo's collectives take GPU tensors, but one a call, and its messages from rank to rank none at all
(`training.machine_rules` refuses what would need more).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import distributed as dist


def install() -> None:
    """Have megatron-core reduce gradients and gather weights one bucket a call, where the group is gloo's."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    assert hasattr(buffers, "_coalescing_manager"), "megatron-core reduces buckets in another way"
    buffers._coalescing_manager = _one_a_call


@contextmanager
def _one_a_call(group: dist.ProcessGroup, *, async_ops: bool = False) -> Iterator[Any]:
    if dist.get_backend(group) == "gloo" and not async_ops:
        yield None
        return
    with dist._coalescing_manager(group, async_ops=async_ops) as works:
        yield works
