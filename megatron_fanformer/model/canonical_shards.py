"""Parameters whose rows or columns lie otherwise on a rank than in the whole tensor, as checkpoints hold them.

A rank of several has its part of each kind of row (periodic, linear) in one parameter, a checkpoint the whole of each
kind, one kind after the other: so every layout and form loads every other's.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor


class CanonicalRange(NamedTuple):
    """A run of a parameter's rows, or columns, and where it belongs in a whole tensor."""

    name: str
    """Ending of the whole tensor's key."""
    start: int
    end: int
    canonical_start: int
    whole: int
    """Number of rows, or columns, of the whole tensor."""


def canonical_factory(
    sharded: ShardedTensor, name: str, ranges: Sequence[CanonicalRange], dim: int = 0
) -> ShardedTensorFactory:
    """Saves a rank's parameter as ranges of whole tensors, and puts them together when loaded.

    Args:
        name: how its key ends, in place of which each range has its own.
        ranges: one after the other, all of the parameter.
        dim: 0 for ranges of rows, 1 of columns.
    """
    axis = sharded.prepend_axis_num  # stock Megatron stacks the layers of a kind along an axis in front

    @torch.no_grad()
    def build(key: str, tensor: Tensor, replica_id: Any, _flattened_range: Any) -> list[ShardedTensor]:
        """Return the parameter, as the ranges that it is."""
        prefix = key.removesuffix(name)  # by now with the layer's global number, or an optimizer state's name
        shards = []
        for range_ in ranges:
            offset, whole = list(sharded.global_offset), list(sharded.global_shape)
            offset[axis + dim], whole[axis + dim] = range_.canonical_start, range_.whole
            data = tensor.narrow(dim, range_.start, range_.end - range_.start)[(None,) * axis]
            shards.append(
                replace(
                    sharded,
                    key=prefix + range_.name,
                    data=data,
                    dtype=tensor.dtype,
                    local_shape=tuple(data.shape),
                    prepend_axis_num=0,
                    global_shape=tuple(whole),
                    global_offset=tuple(offset),
                    axis_fragmentations=None,  # kinds differ in size: no regular grid
                    replica_id=replica_id,
                )
            )
        return shards

    @torch.no_grad()
    def merge(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.flatten(0, axis) for part in parts], dim)

    return ShardedTensorFactory(sharded.key, sharded.data, build, merge, sharded.replica_id)
