"""The optimizer's state in a checkpoint: one form, whichever optimizer wrote it and whichever loads it.

    optimizer.state.STATE.NAME    what the optimizer keeps of the weight NAME: of AdamW, exp_avg and exp_avg_sq
    optimizer.state.param.NAME    its float32 main weight, unless NAME itself is that
    optimizer/param_groups        hyperparameters and the step, per group of weights

Each is stored whole, in the shape of its weight. A rank saves and loads what it has of it in place: all of its own
weights' state, or, with the distributed optimizer, a range of the elements of some, which is cut into rectangles.
Nothing is gathered; megatron-core's own form for all layouts (`fully_reshardable`) gathers on every rank, and also
saves wrong values after a padded bucket (Megatron-LM pull request 5077; seen in 0.16.1 and 0.19.2).
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
    """An optimizer's part of a weight on this rank, which starts at one of the weight's elements."""

    weight: torch.nn.Parameter
    start: int
    tensors: dict[str, Tensor]
    """Tensors by name, all of the same length: states, and `param`, the main weight, where that is not the weight
    itself."""
    instance: int | None
    """Number of the group of ranks that have the rest of it (`num_distributed_optimizer_instances`); None: each data
    parallel rank has the same."""


def stored_state(optimizer: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Return the form above, as a sharded state dict; before the first update, too.

    Args:
        weights: the sharded state dict of the weights, whose data are the parameters themselves.
    """
    shards = dict(enumerate(_shards(optimizer, weights)))
    return {"optimizer": {"param_groups": _stored_groups(optimizer)}, "optimizer_tensors": shards}


def requested_tensors(optimizer: Any, weights: dict[str, Any], stored: Collection[str]) -> dict[int, ShardedTensor]:
    """Return the optimizer's own tensors, to be filled, under the names that a checkpoint has for them.

    Args:
        weights: as for `stored_state`.
        stored: the names of the tensors in the checkpoint.
    """
    shards = _shards(optimizer, weights)
    return {i: dataclasses.replace(shard, key=_stored_name(shard.key, stored)) for i, shard in enumerate(shards)}


def requested_weights(weights: dict[str, Any], stored: Collection[str]) -> dict[str, Any]:
    """Return the weights under the names that a checkpoint has for them: those in float32 are the main ones of a bf16
    run.

    Args:
        weights: by chunk, as `model_state` has them.
    """

    def named(leaf: Any) -> Any:
        is_main = leaf.data.dtype == torch.float32
        return dataclasses.replace(leaf, key=main_weight_name(leaf.key, stored)) if is_main else leaf

    return {chunk: {name: named(leaf) for name, leaf in leaves.items()} for chunk, leaves in weights.items()}


def set_tensors(own: dict[int, Tensor], loaded: dict[int, Tensor]) -> None:
    """Copy tensors that were not loaded in place, since another replica read them."""
    for number, tensor in own.items():
        if loaded[number].data_ptr() != tensor.data_ptr():
            tensor.copy_(loaded[number])


def stored_groups(stored: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the groups in the plain values that a checkpoint has of the optimizer; earlier ones nest them deeper."""
    if "param_groups" in stored:
        return stored["param_groups"]
    return [group for value in stored.values() if isinstance(value, dict) for group in stored_groups(value)]


def set_groups(optimizer: Any, groups: list[dict[str, Any]], names: Collection[str]) -> None:
    """Set the entries of such names, the step above all. Groups are in the same order in all layouts, on all ranks."""
    for own, group in zip(optimizer.param_groups, groups, strict=True):
        own.update({name: group[name] for name in names})


def _stored_groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return every group with the common step, which an optimizer does not count where it has none of its weights."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    step = max(group.get("step", 0) for group in groups)
    return [{**group, "step": step} for group in groups]


def _stored_name(key: str, stored: Collection[str]) -> str:
    return main_weight_name(key.removeprefix(MAIN_WEIGHT), stored) if key.startswith(MAIN_WEIGHT) else key


# -- an optimizer's tensors


def _parts(optimizer: Any, weights: list[torch.nn.Parameter]) -> Iterator[_Part]:
    for single in _single(optimizer):
        # Makes what the first update would make: also before one, checkpoints have it, and each save the same shards.
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


def _single(optimizer: Any) -> list[Any]:
    return getattr(optimizer, "chained_optimizers", [optimizer])


# -- their place in whole tensors


def _shards(optimizer: Any, weights: dict[str, Any]) -> Iterator[ShardedTensor]:
    """Return every part as rectangles of whole tensors; their data are the optimizer's own."""
    pieces = {leaf.data: list(local_shards({"": leaf})) for leaf in nested_values(weights)}
    for part in _parts(optimizer, list(pieces)):
        for piece in pieces[part.weight]:
            for name, tensor in part.tensors.items():
                yield from _rectangles_of(piece, part, f"{STATE_PREFIX}{name}.{piece.key}", tensor.detach().view(-1))


def _rectangles_of(piece: ShardedTensor, part: _Part, key: str, flat: Tensor) -> Iterator[ShardedTensor]:
    """Return the intersection of a part with a piece of its weight, as pieces of the tensor `key`.

    (A weight is one piece, unless several are stored of it: runs of its rows, or of its columns.)

    Args:
        flat: the part's tensor, without its shape.
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
            continue  # all of it is of other pieces
        data = held[tuple(slice(start - at, end - at) for at, start, end in zip(offset, low, high, strict=True))]
        yield dataclasses.replace(
            piece,
            key=key,
            data=data,
            dtype=data.dtype,
            local_shape=tuple(data.shape),
            global_offset=tuple(g + start - c for g, start, c in zip(piece.global_offset, low, corner, strict=True)),
            axis_fragmentations=None,  # not a regular grid
            replica_id=_replica_id(piece, part),
        )


def _replica_id(piece: ShardedTensor, part: _Part) -> Any:
    if part.instance is None:
        return piece.replica_id
    pipeline, tensor, _data = piece.replica_id
    return pipeline, tensor, part.instance


def rectangles(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(first element, offset, shape) of the fewest rectangles that cover a range of a tensor's elements.

    Args:
        shape: of the tensor, of one or two dimensions.
        start, end: the range, in elements of the flattened tensor; empty where `end` is not above `start`.
    """
    columns = shape[-1] if len(shape) == 2 else 1
    while start < end:
        row, column = divmod(start, columns)
        whole_rows = 0 if column else (end - start) // columns
        extent = (whole_rows or 1, columns if whole_rows else min(columns - column, end - start))
        yield start, (row, column)[: len(shape)], extent[: len(shape)]
        start += extent[0] * extent[1]
