"""A rank's parts of whole tensors, with their places in them.

Weights and gradients are placed by global name and slice, a module's output by sample and position. So what all ranks
of any layout saw can be laid over a single process's whole tensors.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megatron_fanformer.model.build import sharded_state
from megatron_fanformer.parity.reordering import Reordering
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.runtime.seeding import local_shards


class TensorPart(NamedTuple):
    """A rank's part of a whole tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    where: tuple[Any, ...]
    """Location of the part: slices of every axis, or lists of samples and positions (the first two axes)."""
    values: np.ndarray


def part_of(whole: np.ndarray, where: tuple[Any, ...]) -> Any:
    """Return what to index a whole tensor with for that part."""
    return where if isinstance(where[0], slice) else np.ix_(*where)


def weight_parts(stages: list[Any], grid: RankGrid, order: Reordering) -> list[TensorPart]:
    """Return this rank's parts of all weights."""
    return list(_parts([sharded_state(chunk, grid) for chunk in stages], order))


def gradient_parts(stages: list[Any], grid: RankGrid, order: Reordering) -> list[TensorPart]:
    """Return this rank's parts of all gradients, as the buffers hold them."""
    states = [sharded_state(chunk, grid) for chunk in stages]
    gradients = [
        # a layer of the Engine has a state besides its weights, whose data are bytes
        {name: _gradient_of(value) for name, value in state.items() if isinstance(value.data, torch.nn.Parameter)}
        for state in states
    ]
    return list(_parts(gradients, order))


def _gradient_of(sharded: Any) -> Any:
    gradient = sharded.data.main_grad
    kind = {"dtype": gradient.dtype} if isinstance(sharded, ShardedTensor) else {}
    return dataclasses.replace(sharded, data=gradient, **kind)


def _parts(states: list[dict[str, Any]], order: Reordering) -> Iterator[TensorPart]:
    """Yield the parts; a reordered run's one rank has whole tensors, which are put into the original order."""
    by_name: dict[str, list[TensorPart]] = {}
    for state in states:
        for shard in local_shards(state):
            part = TensorPart(shard.key, tuple(shard.global_shape), shard.global_slice(), as_array(shard.data))
            by_name.setdefault(shard.key, []).append(part)
    for parts in by_name.values():
        yield from ([_restored(parts, order)] if order.number else parts)


def _restored(parts: list[TensorPart], order: Reordering) -> TensorPart:
    name, shape = parts[0].name, parts[0].shape
    whole = torch.empty(shape)
    for part in parts:
        whole[part.where] = torch.from_numpy(part.values)
    everything = tuple(slice(None) for _ in shape)
    return TensorPart(name, shape, everything, as_array(order.restored(name, whole)))


def restored_output(part: TensorPart, order: Reordering) -> TensorPart:
    """Return an output of a reordered run under the samples and coordinates of the original order."""
    if not order.number:
        return part
    samples, positions = part.where
    along = {"fan": order.x_f, "v_fan": None, "token loss": None}.get(part.name.rpartition(".")[2], order.hidden)
    values = part.values if along is None else part.values[..., along.argsort().numpy()]
    return part._replace(where=([order.sample(sample) for sample in samples], positions), values=values)


def as_array(tensor: Tensor) -> np.ndarray:
    """Return a copy in float32, made by torch: a storage that NumPy has shared cannot be freed by recomputation."""
    return tensor.detach().to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format).numpy()


def gather_gradients(wrapped: list[Any]) -> None:
    """Complete the gradient buffers: under the distributed optimizer each replica has only its own shard summed."""
    for stage in wrapped:
        if not stage.ddp_config.use_distributed_optimizer:
            continue
        for group in stage.bucket_groups:
            ranks = group.intra_distributed_optimizer_instance_group
            for bucket in group.buckets if ranks.size() > 1 else []:
                own = bucket.grad_data.chunk(ranks.size())[ranks.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, own, group=ranks)
