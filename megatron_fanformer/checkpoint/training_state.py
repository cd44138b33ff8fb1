"""A run's state as a sharded state dict, to save and to load: weights, optimizer, progress.

Weights and optimizer state have global names, so every layout loads any other's. There are no random states: training
draws nothing, and the order of samples follows from the seed.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_fanformer.checkpoint import megatron_versions
from megatron_fanformer.checkpoint.data_files import UnreadableError, reporting_damage
from megatron_fanformer.checkpoint.stored_files import (
    MAIN_WEIGHT,
    STATE_PREFIX,
    Table,
    main_weight_name,
    read_checked,
    saved_progress,
    tensors_of,
)
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.runtime.agreement import of_every_rank, reported_by_main
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.runtime.seeding import local_shards

EXTRA_STATE = "_extra_state"
FP8_SCALES = "fp8_scales"
DIRECTIONS = ("scaling_fwd", "scaling_bwd")
TENSORS = ("scale", "amax_history")


def training_state(stages: list[Any], optimizer: Any, progress: dict[str, Any], grid: RankGrid) -> dict[str, Any]:
    """Return this rank's part of a checkpoint; `stages` are the chunks of its stage. Every rank calls it."""
    weights = model_state(stages, grid)
    return {
        **weights,
        **stored_state(optimizer, weights),
        "progress": progress,
        **scales_to_save(stages, grid),
    }


def load_training_state(
    checkpoint: Path,
    *,
    stages: list[Any],
    optimizer: Any,
    grid: RankGrid,
    resumed_entries: Collection[str],
) -> dict[str, Any]:
    """Load weights and optimizer in place; return the saved progress.

    Of the optimizer's parameter groups the `resumed_entries` are loaded; the others stay this run's.
    """
    table = _read_checked(checkpoint, grid)
    stored = tensors_of(table)
    weights = model_state(stages, grid)
    # Looked up by the weights while these are still the parameters themselves: loading detaches them.
    tensors = requested_tensors(optimizer, weights, stored)
    requested = {**requested_weights(weights, stored), **scales_to_load(stages, grid, table)}
    loaded = megatron_versions.load(requested, checkpoint, table, grid.groups.dp_cp)
    with reporting_damage(checkpoint):
        _set_weights(stages, loaded)
        set_scales(stages, grid, loaded)
    # Separately from the weights, some of which it may need in float32: one load returns a name in one type.
    local = {number: shard.data for number, shard in tensors.items()}
    loaded_optimizer = megatron_versions.load({"optimizer_tensors": tensors}, checkpoint, table, grid.groups.dp_cp)
    with reporting_damage(checkpoint):
        set_tensors(local, loaded_optimizer["optimizer_tensors"])
        set_groups(optimizer, loaded_optimizer["optimizer"]["param_groups"], resumed_entries)
        progress: dict[str, Any] = loaded["progress"]
    return progress


def load_weights(checkpoint: Path, stages: list[Any], grid: RankGrid) -> None:
    """Load only the weights of a stage's chunks, from a checkpoint of any layout."""
    table = _read_checked(checkpoint, grid)
    loaded = megatron_versions.load(model_state(stages, grid), checkpoint, table, grid.groups.dp_cp)
    _set_weights(stages, loaded)


def model_state(stages: list[Any], grid: RankGrid) -> dict[str, dict[str, Any]]:
    """Return the parameters of a stage's chunks as sharded tensors, by chunk: {"model0": {name: tensor}, ...}.

    Global names count layers through the whole model. Layers' extra state (Transformer Engine's FP8 scales, see below)
    is left out, so that local and Transformer Engine layers load each other's checkpoints.
    """
    states = [chunk.sharded_state_dict(metadata=grid.sharding_metadata) for chunk in stages]
    return {
        f"model{number}": {name: value for name, value in state.items() if not name.endswith(EXTRA_STATE)}
        for number, state in enumerate(states)
    }


def _set_weights(stages: list[Any], loaded: dict[str, Any]) -> None:
    for number, chunk in enumerate(stages):
        chunk.load_state_dict(loaded[f"model{number}"], strict=False)


def _read_checked(checkpoint: Path, grid: RankGrid) -> Table:
    """Verify a checkpoint, each rank a share of it, and return its table.

    If one rank refuses it, all do: none is left waiting in the load, which is collective.
    """
    table: Table | None = None
    problem: CorruptError | None = None
    try:
        table = read_checked(checkpoint, share=grid.rank, shares=grid.world_size)
        saved_progress(checkpoint, table)
    except CorruptError as error:
        problem = error
    # Damage first: it may be the reason why another rank could not read.
    problems = [of_rank for of_rank in of_every_rank(problem) if of_rank is not None]
    if problems:
        raise reported_by_main(min(problems, key=lambda of_rank: isinstance(of_rank, UnreadableError)))
    assert table is not None, "this rank has no problem"
    return table


# -- FP8

# The scales of FP8's `delayed` recipe, as plain tensors: they come from past steps, and a resumed run needs them.
# (Other recipes take their scales from the current tensor. Transformer Engine's own form of this state is a pickle.)
# They differ only between pipeline stages, since their largest values are reduced over tensor, context and data
# parallel ranks. Other layers and recipes do not read them, so FP8 and other runs can load each other's checkpoints.


def scales_to_save(stages: list[Any], grid: RankGrid) -> dict[str, dict[str, ShardedObject]]:
    """Return a state dict of the scales of this rank's chunks; empty without the recipe."""
    scales = {}
    for shard, layer in _layers(stages, grid):
        if all(direction in layer.fp8_meta for direction in DIRECTIONS):  # else it has not run in FP8 yet
            tensors = {
                f"{direction}.{name}": getattr(layer.fp8_meta[direction], name).detach().cpu().clone()
                for direction in DIRECTIONS
                for name in TENSORS
            }
            scales[shard.unique_key] = replace(shard, data=tensors)
    return {FP8_SCALES: scales} if scales else {}


def scales_to_load(stages: list[Any], grid: RankGrid, table: Table) -> dict[str, dict[str, ShardedObject]]:
    """Return the same state dict without data, for the scales that a checkpoint has; empty if it has none."""
    shards = {shard.unique_key: shard for shard, _ in _layers(stages, grid)}
    scales = {name: shard for name, shard in shards.items() if name in table.state_dict_metadata}
    return {FP8_SCALES: scales} if scales else {}


@torch.no_grad()
def set_scales(stages: list[Any], grid: RankGrid, loaded: dict[str, Any]) -> None:
    """Copy the scales in a loaded state dict into the layers."""
    from megatron.core.fp8_utils import get_fp8_recipe

    loaded_scales = loaded.get(FP8_SCALES, {})
    for shard, layer in _layers(stages, grid):
        if (scales := loaded_scales.get(shard.unique_key)) is None:
            continue
        recipe = get_fp8_recipe(layer.config)
        layer.fp8_meta.update(recipe=recipe, num_gemms=1)
        layer.init_fp8_meta_tensors(recipe)  # the first forward would make them, and keeps existing ones
        for direction in DIRECTIONS:
            state = layer.fp8_meta[direction]
            state.scale.copy_(scales[f"{direction}.scale"])
            history = scales[f"{direction}.amax_history"]
            kept = min(len(history), len(state.amax_history))  # the run may use another length by now
            state.amax_history[:kept].copy_(history[:kept])


def _layers(stages: list[Any], grid: RankGrid) -> Iterator[tuple[ShardedObject, Any]]:
    """Yield the layers that may run in FP8, with empty shards that have their global names."""
    config = stages[0].config
    if not config.fp8 or config.fp8_recipe != "delayed":
        return
    for chunk in stages:
        for name, shard in chunk.sharded_state_dict(metadata=grid.sharding_metadata).items():
            layer = chunk.get_submodule(name.removesuffix(f".{EXTRA_STATE}")) if name.endswith(EXTRA_STATE) else None
            if hasattr(layer, "init_fp8_meta_tensors") and isinstance(shard, ShardedObject):
                yield replace(shard, key=shard.key.removesuffix(EXTRA_STATE) + FP8_SCALES, data=None), layer


# -- the optimizer

# The optimizer's state in a checkpoint: one form, whichever optimizer writes it and whichever loads it.
#
#     optimizer.state.STATE.NAME    a state of the weight NAME: of AdamW, exp_avg and exp_avg_sq
#     optimizer.state.param.NAME    its float32 main weight, unless NAME itself is that
#     optimizer/param_groups        hyperparameters and the step, per group of weights
#
# Each tensor has the shape of its weight. A rank saves and loads in place the part that it has: the state of all its
# weights, or, with the distributed optimizer, a range of the elements of some, which is cut into rectangles. Nothing is
# gathered. (megatron-core's form for all layouts, `fully_reshardable`, gathers on every rank, and saves wrong values
# after a padded bucket: Megatron-LM pull request 5077, seen in 0.16.1 and 0.19.2.)


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

    `weights` is the sharded state dict of the weights, whose data are the parameters themselves.
    """
    shards = dict(enumerate(_shards(optimizer, weights)))
    return {"optimizer": {"param_groups": _stored_groups(optimizer)}, "optimizer_tensors": shards}


def requested_tensors(optimizer: Any, weights: dict[str, Any], stored: Collection[str]) -> dict[int, ShardedTensor]:
    """Return the optimizer's tensors, to load into, under the names that a checkpoint, `stored`, has for them."""
    shards = {}
    for number, shard in enumerate(_shards(optimizer, weights)):
        if shard.key.startswith(MAIN_WEIGHT):
            shard = replace(shard, key=main_weight_name(shard.key.removeprefix(MAIN_WEIGHT), stored))
        shards[number] = shard
    return shards


def requested_weights(weights: dict[str, Any], stored: Collection[str]) -> dict[str, Any]:
    """Return the weights under the names that a checkpoint has for them; in float32 a bf16 run's main ones."""

    def named(leaf: Any) -> Any:
        is_main = leaf.data.dtype == torch.float32
        return replace(leaf, key=main_weight_name(leaf.key, stored)) if is_main else leaf

    return {chunk: {name: named(leaf) for name, leaf in leaves.items()} for chunk, leaves in weights.items()}


def set_tensors(local: dict[int, Tensor], loaded: dict[int, Tensor]) -> None:
    """Copy the tensors that were not loaded in place, because another replica read them."""
    for number, tensor in local.items():
        if loaded[number].data_ptr() != tensor.data_ptr():
            tensor.copy_(loaded[number])


def set_groups(optimizer: Any, groups: list[dict[str, Any]], names: Collection[str]) -> None:
    """Set these entries of the groups, such as the step. Groups have the same order in all layouts, on all ranks."""
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: stored[name] for name in names})


def _stored_groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return every group with the common step, which an optimizer does not count in groups without local weights."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    step = max(group.get("step", 0) for group in groups)
    return [{**group, "step": step} for group in groups]


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
        yield replace(
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
