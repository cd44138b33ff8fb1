"""This rank's shards in a sharded state dict, one by one."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor


def local_shards(sharded_state: dict[str, Any]) -> Iterator["ShardedTensor"]:
    """Return every shard of a sharded state dict, with its global name, shape and offset; factories are expanded.

    Their data are views of the parameters.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for value in nested_values(sharded_state):
        if isinstance(value, ShardedTensorFactory):
            yield from nested_values(value.build())
        elif isinstance(value, ShardedTensor):
            yield value
