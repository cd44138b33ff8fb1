"""Seeds, initial weights that do not depend on the layout, and this rank's shards of a sharded state dict.

A weight is drawn whole, from the seed and the weight's global name, and each rank keeps its slice: every layout starts
from the same model.
"""

import hashlib
import math
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

TRUNCATE_AT_STDS = 3.0


def seed_everything(seed: int, *, graphable: bool = False) -> None:
    """Seed Python, NumPy, torch and Megatron's tensor parallel random states.

    Args:
        graphable: make Megatron's random states of a kind that CUDA graphs can capture: Transformer Engine's, if it is
            installed, since its attention can capture no other.
    """
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, te_rng_tracker=graphable, use_cudagraphable_rng=graphable)


@torch.no_grad()
def initialize_by_name(sharded_state: dict[str, Any], seed: int, draw: Callable[..., torch.Tensor]) -> None:
    """Fill each parameter of `sharded_state` with its slice of `draw(name, shape, generator)`, drawn in float32."""
    name, whole = "", torch.empty(0)
    for shard in local_shards(sharded_state):
        if shard.key != name:  # the shards of one tensor follow one another
            name = shard.key
            whole = draw(name, tuple(shard.global_shape), generator_for(seed, name))
        shard.data.copy_(whole[shard.global_slice()])


def generator_for(seed: int, name: str) -> torch.Generator:
    """Return a CPU random generator that depends on the seed and the name alone."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # an int64, not negative


def truncated_normal(shape: tuple[int, ...], std: float, generator: torch.Generator) -> torch.Tensor:
    """Return normal numbers of mean 0 in float32, truncated at three standard deviations, from uniform ones.

    (torch's own function draws differently in 2.13 than in 2.11: the same seed would give other weights.)
    """
    uniform = torch.rand(shape, generator=generator).mul_(2).sub_(1)  # in [-1, 1)
    return uniform.mul_(math.erf(TRUNCATE_AT_STDS / math.sqrt(2))).erfinv_().mul_(std * math.sqrt(2))


def local_shards(sharded_state: dict[str, Any]) -> Iterator["ShardedTensor"]:
    """Yield every shard of a sharded state dict, including the shards that its factories build.

    A shard has its global name, shape and offset, and its data is a view of the parameter.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for value in nested_values(sharded_state):
        if isinstance(value, ShardedTensorFactory):
            yield from nested_values(value.build())
        elif isinstance(value, ShardedTensor):
            yield value
