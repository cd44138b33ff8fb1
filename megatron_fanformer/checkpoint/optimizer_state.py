"""The optimizer's state in a checkpoint: one form, whichever optimizer writes it and whichever loads it.

    optimizer.state.STATE.NAME    a state of the weight NAME: of AdamW, exp_avg and exp_avg_sq
    optimizer.state.param.NAME    its float32 main weight, unless NAME itself is that
    optimizer/param_groups        hyperparameters and the step, per group of weights

Each tensor has the shape of its weight. A rank saves and loads in place the part that it has: the state of all its
weights, or, with the distributed optimizer, a range of the elements of some, which is cut into rectangles. Nothing is
gathered. (megatron-core's form for all layouts, `fully_reshardable`, gathers on every rank, and saves wrong values
after a padded bucket: Megatron-LM pull request 5077, seen in 0.16.1 and 0.19.2.)
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_fanformer.checkpoint.stored_files import MAIN_WEIGHT, STATE_PREFIX, main_weight_name
from megatron_fanformer.runtime.seeding import local_shards


class _Part(NamedTuple):
    """An optimizer's state of a range of a weight's elements, on this rank."""

    weight: torch.nn.Parameter
    start: int
    """The range's first element."""
    tensors: dict[str, Tensor]
    """Tensors of the range by name: states, and `param`, the main weight, unless that is the weight itself."""
    instance: int | None
    """Number of the group of ranks that have the other ranges (`num_distributed_optimizer_instances`); None: every data
    parallel rank has the whole weight."""


def stored_state(optimizer: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Return the optimizer's state as a sharded state dict, also before the first update.

    Args:
        weights: the sharded state dict of the weights, whose data are the parameters themselves.
    """
    shards = dict(enumerate(_shards(optimizer, weights)))
    return {"optimizer": {"param_groups": _stored_groups(optimizer)}, "optimizer_tensors": shards}


def requested_tensors(optimizer: Any, weights: dict[str, Any], stored: Collection[str]) -> dict[int, ShardedTensor]:
    """Return the optimizer's tensors, to load into, under the names that a checkpoint has for them.

    Args:
        weights: as for `stored_state`.
        stored: the names of the tensors in the checkpoint.
    """
    shards = {}
    for number, shard in enumerate(_shards(optimizer, weights)):
        if shard.key.startswith(MAIN_WEIGHT):
            shard = dataclasses.replace(shard, key=main_weight_name(shard.key.removeprefix(MAIN_WEIGHT), stored))
        shards[number] = shard
    return shards


def requested_weights(weights: dict[str, Any], stored: Collection[str]) -> dict[str, Any]:
    """Return the weights under the names that a checkpoint has for them; float32 weights load a bf16 run's main ones.

    Args:
        weights: by chunk, from `model_state`.
    """

    def named(leaf: Any) -> Any:
        is_main = leaf.data.dtype == torch.float32
        return dataclasses.replace(leaf, key=main_weight_name(leaf.key, stored)) if is_main else leaf

    return {chunk: {name: named(leaf) for name, leaf in leaves.items()} for chunk, leaves in weights.items()}


def set_tensors(local: dict[int, Tensor], loaded: dict[int, Tensor]) -> None:
    """Copy the tensors that were not loaded in place, because another replica read them."""
    for number, tensor in local.items():
        if loaded[number].data_ptr() != tensor.data_ptr():
            tensor.copy_(loaded[number])


def stored_groups(stored: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parameter groups in a checkpoint's plain values; those of before 2026-11-23 nest them deeper."""
    if "param_groups" in stored:
        return stored["param_groups"]
    return [group for value in stored.values() if isinstance(value, dict) for group in stored_groups(value)]


def set_groups(optimizer: Any, groups: list[dict[str, Any]], names: Collection[str]) -> None:
    """Set these entries of the groups, such as the step. Groups have the same order in all layouts, on all ranks."""
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: stored[name] for name in names})


def _stored_groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return every group with the common step, which an optimizer does not count in groups without local weights."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    step = max(group.get("step", 0) for group in groups)
    return [{**group, "step": step} for group in groups]


# -- an optimizer's tensors


def _parts(optimizer: Any, weights: list[torch.nn.Parameter]) -> Iterator[_Part]:
    for single in getattr(optimizer, "chained_optimizers", [optimizer]):
        # Makes the states that the first update would make: every save has the same shards.
        single.init_state_fn(single.optimizer, single.config)
        if isinstance(single, DistributedOptimizer):
            yield from _distributed_parts(single)
        else:
            updated = {main for group in single.param_groups for main in group["params"]}
            mains = ((weight, getattr(weight, "main_param", weight)) for weight in weights)
            state = single.optimizer.state
            yield from (_part(weight, 0, main, state[main], None) for weight, main in mains if main in updated)


def _distributed_parts(optimizer: Any) -> Iterator[_Part]:
    for buffer in optimizer.gbuf_ranges:
        for bucket in (bucket for buckets in buffer.values() for bucket in buckets):
            for weight, ranges in bucket["param_map"].items():
                state = dict(optimizer._get_main_param_and_optimizer_states(weight))
                main = state.pop("param")
                yield _part(weight, ranges["param"].start, main, state, optimizer.distributed_optimizer_instance_id)


def _part(
    weight: torch.nn.Parameter, start: int, main: Tensor, state: Mapping[str, Tensor], instance: int | None
) -> _Part:
    assert all(tensor.shape == main.shape for tensor in state.values()), f"states of other shapes: {list(state)}"
    tensors = {**state, **({} if weight.dtype == torch.float32 else {"param": main})}
    return _Part(weight, start, tensors, instance)


# -- as pieces of whole tensors


def _shards(optimizer: Any, weights: dict[str, Any]) -> Iterator[ShardedTensor]:
    """Yield every part as rectangles of whole tensors; their data are the optimizer's."""
    pieces = {leaf.data: list(local_shards({"": leaf})) for leaf in nested_values(weights)}
    for part in _parts(optimizer, list(pieces)):
        for piece in pieces[part.weight]:
            for name, tensor in part.tensors.items():
                yield from _rectangles_of(piece, part, f"{STATE_PREFIX}{name}.{piece.key}", tensor.detach().view(-1))


def _rectangles_of(piece: ShardedTensor, part: _Part, key: str, flat: Tensor) -> Iterator[ShardedTensor]:
    """Yield the intersection of a part with a piece of its weight, as pieces of the tensor `key`.

    (A weight is one piece, unless it is stored as several: runs of its rows, or of its columns.)

    Args:
        flat: the part's tensor, flattened.
    """
    assert piece.data is not None and not piece.prepend_axis_num
    weight = tuple(part.weight.shape)
    before = piece.data.storage_offset() - part.weight.storage_offset()  # elements of the weight
    corner = divmod(before, weight[1]) if len(weight) == 2 else (before,)
    for first, offset, extent in rectangles(weight, part.start, part.start + flat.numel()):
        held = flat.narrow(0, first - part.start, torch.Size(extent).numel()).view(extent)
        low = tuple(map(max, offset, corner))
        high = tuple(
            min(at + size, c + s) for at, size, c, s in zip(offset, extent, corner, piece.data.shape, strict=True)
        )
        if any(end <= start for start, end in zip(low, high, strict=True)):
            continue  # it belongs to other pieces
        data = held[tuple(slice(start - at, end - at) for at, start, end in zip(offset, low, high, strict=True))]
        yield dataclasses.replace(
            piece,
            key=key,
            data=data,
            dtype=data.dtype,
            local_shape=tuple(data.shape),
            global_offset=tuple(g + start - c for g, start, c in zip(piece.global_offset, low, corner, strict=True)),
            axis_fragmentations=None,  # not a regular grid
            replica_id=piece.replica_id if part.instance is None else (*piece.replica_id[:2], part.instance),
        )


def rectangles(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield (first element, offset, shape) of the fewest rectangles that cover a range of a tensor's elements.

    Args:
        shape: the tensor's, of one or two dimensions.
        start, end: the range, in elements of the flattened tensor.
    """
    columns = shape[-1] if len(shape) == 2 else 1
    while start < end:
        row, column = divmod(start, columns)
        whole_rows = 0 if column else (end - start) // columns
        extent = (whole_rows or 1, columns if whole_rows else min(columns - column, end - start))
        yield start, (row, column)[: len(shape)], extent[: len(shape)]
        start += extent[0] * extent[1]
