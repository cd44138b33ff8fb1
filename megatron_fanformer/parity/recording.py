"""Records a rank's weights, gradients and outputs as parts of whole tensors.

A part of a weight or a gradient is located by slices, a part of a module's output by samples and positions. So the
parts of all ranks, in any layout, can be compared with the whole tensors of a single process.

Shapes: s sequence, b micro batch, w width of a module; outputs are [s, b, w], or [b, s] for the loss of each token. If
attention stays within documents, they are [b * s, 1, w] and [1, b * s]: the samples follow each other in one row.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from megatron_fanformer.model.build import sharded_state
from megatron_fanformer.model.fan_layer import ActivatedColumnParallelLinear, FANProjection
from megatron_fanformer.parity.reordering import Reordering
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.runtime.pipeline import local_positions
from megatron_fanformer.runtime.seeding import local_shards

TOKEN_LOSS = "token loss"
OUTPUT_MAKERS = (FANProjection, ActivatedColumnParallelLinear)
"""Modules that return a FAN layer's outputs: the FAN map, or the layer that applies the cosine and sine to its rows."""


class TensorPart(NamedTuple):
    """A rank's part of a whole tensor."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    where: tuple[Any, ...]
    """Location of the part: slices of all axes, or lists of samples and positions (the first two axes)."""
    values: np.ndarray


def index_of(part: TensorPart) -> Any:
    """Return the index of a part in the whole tensor, for NumPy: slices, or the grid of its samples and positions."""
    return part.where if isinstance(part.where[0], slice) else np.ix_(*part.where)


def weight_parts(
    stages: list[Any], grid: RankGrid, order: Reordering, *, of_gradients: bool = False
) -> list[TensorPart]:
    """Return this rank's parts of all weights or, with `of_gradients`, of the gradients in their buffers.

    A reordered run has one rank, whose parts make up whole tensors, which are returned in the original order.
    """
    states = [sharded_state(chunk, grid) for chunk in stages]
    if of_gradients:
        # The state of a Transformer Engine layer also has bytes, which have no gradient.
        states = [
            {name: _gradient_of(value) for name, value in state.items() if isinstance(value.data, torch.nn.Parameter)}
            for state in states
        ]
    parts = [
        TensorPart(shard.key, tuple(shard.global_shape), shard.global_slice(), as_array(shard.data))
        for state in states
        for shard in local_shards(state)
    ]
    if not order.number:  # the original order
        return parts
    whole = {part.name: torch.empty(part.shape) for part in parts}
    for part in parts:
        whole[part.name][part.where] = torch.from_numpy(part.values)
    return [
        TensorPart(name, tuple(tensor.shape), (slice(None),) * tensor.ndim, as_array(order.restored(name, tensor)))
        for name, tensor in whole.items()
    ]


def _gradient_of(sharded: Any) -> Any:
    """Return the gradient of a sharded weight, sharded like the weight."""
    gradient = sharded.data.main_grad
    dtype = {"dtype": gradient.dtype} if isinstance(sharded, ShardedTensor) else {}  # ShardedTensorFactory has none
    return dataclasses.replace(sharded, data=gradient, **dtype)


def restored_output(part: TensorPart, order: Reordering) -> TensorPart:
    """Return an output of a reordered run with the samples and coordinates (the last axis) in the original order."""
    if not order.number:  # the original order
        return part
    samples, positions = part.where
    module = part.name.rpartition(".")[2]
    new_order = {"fan": order.x_f, "v_fan": None, TOKEN_LOSS: None}.get(module, order.hidden)  # None: never reordered
    values = part.values if new_order is None else part.values[..., new_order.argsort().numpy()]
    return part._replace(where=([order.sample(sample) for sample in samples], positions), values=values)


def as_array(tensor: Tensor) -> np.ndarray:
    """Return a copy in float32 that shares no memory with the tensor, so that recomputation can free the tensor."""
    return tensor.detach().to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format).numpy()


def gather_gradients(wrapped: list[Any]) -> None:
    """Complete the gradient buffers: with the distributed optimizer, only a rank's own shard has summed gradients."""
    groups = [group for stage in wrapped if stage.ddp_config.use_distributed_optimizer for group in stage.bucket_groups]
    for group in groups:
        sharing = group.intra_distributed_optimizer_instance_group  # the process group whose ranks have the shards
        if sharing.size() == 1:
            continue
        for bucket in group.buckets:
            shard = bucket.grad_data.chunk(sharing.size())[sharing.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, shard, group=sharing)


class OutputRecorder:
    """A context manager that records the outputs of one step's forward passes, but not of recomputation."""

    def __init__(self, stages: list[Any], grid: RankGrid, global_batch_size: int, micro_batch_size: int) -> None:
        self.parts: list[TensorPart] = []
        self._grid, self._global_batch_size, self._micro_batch_size = grid, global_batch_size, micro_batch_size
        self._seq_length = stages[0].max_sequence_length
        self._micro_batch_by_chunk: dict[int, int] = {}  # of the chunk's last forward pass
        self._is_in_forward = False  # whether a forward pass is running that is not recomputation
        self._hooks = [hook for number, chunk in enumerate(stages) for hook in self._watch(number, chunk)]

    def __enter__(self) -> "OutputRecorder":
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _watch(self, number: int, chunk: Any) -> list[Any]:
        """Add hooks to a chunk, and to modules whose outputs have their whole width on each rank; return the hooks."""
        modules = [("embedding", chunk.embedding)] if chunk.pre_process else []
        for layer in chunk.decoder.layers:
            name = f"layers.{layer.layer_number - 1}"  # megatron-core counts layers through all stages, from 1
            # If attention has several of these modules, its forward pass calls only one.
            makers = [module for module in layer.self_attention.modules() if isinstance(module, OUTPUT_MAKERS)]
            modules += [(f"{name}.fan", maker) for maker in makers]
            modules += [(f"{name}.self_attention", layer.self_attention), (f"{name}.mlp", layer.mlp), (name, layer)]
        if chunk.decoder.final_layernorm is not None:
            modules.append(("final_layernorm", chunk.decoder.final_layernorm))
        return [
            chunk.register_forward_pre_hook(functools.partial(self._begin, number)),
            chunk.register_forward_hook(functools.partial(self._end, number)),
            *(module.register_forward_hook(functools.partial(self._record, number, name)) for name, module in modules),
        ]

    def _begin(self, number: int, *_: Any) -> None:
        self._is_in_forward = True
        self._micro_batch_by_chunk[number] = self._micro_batch_by_chunk.get(number, -1) + 1

    def _end(self, number: int, chunk: Any, _inputs: Any, output: Tensor) -> None:
        self._is_in_forward = False  # until the next `_begin`, modules run only for recomputation in a backward pass
        if chunk.post_process:
            self._keep(TOKEN_LOSS, self._micro_batch_by_chunk[number], output.t().unsqueeze(-1))  # [b, s] -> [s, b, 1]

    def _record(self, number: int, name: str, module: Any, _inputs: Any, output: Any) -> None:
        if not self._is_in_forward:
            return
        outputs = {name: output[0] if isinstance(output, tuple) else output}
        if name.endswith(".fan"):
            features = output[1] if isinstance(module, ActivatedColumnParallelLinear) else output  # [0] is the product
            names = (name, name.replace(".fan", ".v_fan"))
            outputs = dict(zip(names, features, strict=False))  # some placements have no map of values
        for part_name, tensor in outputs.items():
            self._keep(part_name, self._micro_batch_by_chunk[number], tensor)

    def _keep(self, name: str, micro_batch: int, output_sbw: Tensor) -> None:
        """Keep a copy of an output, as parts that are located by sample and position."""
        size = self._micro_batch_size
        first = (micro_batch * self._grid.data_parallel_size + self._grid.data_parallel_rank) * size
        samples = list(range(first, first + size))
        whole_shape = (self._global_batch_size, self._seq_length, output_sbw.shape[-1])
        values = as_array(output_sbw.transpose(0, 1))
        length = values.shape[1]
        if len(values) == size:
            where = (samples, self._positions(self._seq_length, length))
            self.parts.append(TensorPart(name, whole_shape, where, values))
            return
        # Attention stays within documents: all samples are one row, of which this rank may have a part.
        indices, positions = divmod(self._positions(size * self._seq_length, length), self._seq_length)
        for index in np.unique(indices):
            is_in_sample = indices == index
            where = ([samples[index]], positions[is_in_sample])
            self.parts.append(TensorPart(name, whole_shape, where, values[:, is_in_sample]))

    def _positions(self, whole: int, length: int) -> np.ndarray:
        """Return the positions, in a sequence of length `whole`, of an output of `length` on this rank."""
        positions = local_positions(torch.arange(whole).unsqueeze(0), self._grid).squeeze(0)
        if length != len(positions):  # by sequence parallelism, tensor parallel ranks divide the positions
            positions = positions.chunk(len(positions) // length)[self._grid.groups.tp.rank()]
        return positions.numpy()
