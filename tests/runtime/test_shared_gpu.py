"""Ranks that share a GPU: megatron-core's buckets over gloo, one a call; what a CPU can show of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed as dist

from megatron_fanformer.runtime.parallel import reduce_one_bucket_a_call


def reduced_twice() -> tuple[bool, list[float]]:
    """At once, which must not be coalesced, and in the background, which torch's own manager waits for."""
    from megatron.core.distributed import param_and_grad_buffer as buffers

    theirs, tensor = buffers._coalescing_manager, torch.ones(2)
    try:
        reduce_one_bucket_a_call()
        with buffers._coalescing_manager(dist.group.WORLD) as nothing:
            dist.all_reduce(tensor)
        with buffers._coalescing_manager(dist.group.WORLD, async_ops=True) as works:
            dist.all_reduce(tensor, async_op=True)
        works.wait()
    finally:
        buffers._coalescing_manager = theirs
    return nothing is None, tensor.tolist()


def test_buckets_are_reduced_one_a_call(run_on_ranks: Callable[..., list[Any]]) -> None:
    assert run_on_ranks(2, reduced_twice) == [(True, [4.0, 4.0])] * 2
