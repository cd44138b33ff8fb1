"""Looks at a state before it is saved: what is published must be worth going on from, and fit on the disk."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from torch import Tensor

from megatron_fanformer.errors import DivergenceError
from megatron_fanformer.runtime.parallel import RankGrid


@torch.no_grad()
def check_finite(sharded_state: dict[str, Any], step: int, grid: RankGrid) -> None:
    """Look at every tensor that this rank holds of a state, in one pass; every rank calls it.

    Raises:
        DivergenceError: one has a value that is not finite; names it, and the rank that holds it, on every rank.
    """
    named = [(part.key, part.data) for part in _parts(sharded_state) if part.data.is_floating_point()]
    found = next(
        (f"{name} has the value {value}" for name, value in _extremes(named) if not math.isfinite(value)), None
    )
    told: list[str | None] = [found]
    if grid.world_size > 1:
        told = [None] * grid.world_size
        dist.all_gather_object(told, found)
    for rank, what in enumerate(told):
        if what is not None:
            where = f" on rank {rank}" if grid.world_size > 1 else ""
            raise DivergenceError(
                f"step {step} was not saved: {what}{where}; start again to go on from the last checkpoint, with a "
                "lower optimizer.lr if it happens again"
            )


def bytes_of(sharded_state: dict[str, Any], grid: RankGrid) -> int:
    """The bytes of a state's tensors over all ranks, each counted once; every rank calls it."""
    own = sum(part.data.nbytes for part in _parts(sharded_state) if is_main_replica(part.replica_id))
    every = [own]
    if grid.world_size > 1:
        every = [0] * grid.world_size
        dist.all_gather_object(every, own)
    return sum(every)


def _extremes(named: list[tuple[str, Tensor]]) -> Iterator[tuple[str, float]]:
    """For each tensor a number that is finite if all of it is; the device is waited for once."""
    named = [(name, tensor) for name, tensor in named if tensor.numel()]
    if not named:
        return
    # Not isfinite, which makes a tensor of the same size; both extremes are NaN where there is one.
    extremes = [torch.stack(torch.aminmax(tensor)).double().abs().max() for _, tensor in named]
    devices = {tensor.device for _, tensor in named}
    values = torch.stack(extremes).tolist() if len(devices) == 1 else [extreme.item() for extreme in extremes]
    yield from zip((name for name, _ in named), values, strict=True)


def _parts(state: Any) -> Iterator[Any]:
    """The parts of tensors that this rank holds: `key`, the tensor's global name, `data` and `replica_id`."""
    if isinstance(state, ShardedTensor | ShardedTensorFactory):
        if isinstance(state.data, Tensor):
            yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _parts(value)
