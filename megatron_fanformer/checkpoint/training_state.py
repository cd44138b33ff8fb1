"""A run's state as a sharded state dict, to save and to load: weights, optimizer, progress.

Tensors have the names and the shapes that they have in the whole model, so every layout loads a checkpoint of any
other. Random states are not saved: training draws no random numbers, and the seed alone decides the order of samples.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from operator import add, le, sub
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
from megatron_fanformer.runtime.agreement import gather_values, reported_by_main
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.runtime.seeding import local_shards

EXTRA_STATE = "_extra_state"
FP8_SCALES = "fp8_scales"
DIRECTIONS = ("scaling_fwd", "scaling_bwd")
TENSORS = ("scale", "amax_history")


def training_state(stages: list[Any], optimizer: Any, progress: dict[str, Any], grid: RankGrid) -> dict[str, Any]:
    """Return this rank's part of a checkpoint; `stages` are the chunks of the rank's pipeline stage."""
    weights = model_state(stages, grid)
    return {**weights, **stored_state(optimizer, weights), "progress": progress, **scales_to_save(stages, grid)}


def load_training_state(
    checkpoint: Path, *, stages: list[Any], optimizer: Any, grid: RankGrid, resumed_entries: Collection[str]
) -> dict[str, Any]:
    """Load weights and optimizer in place, and return the saved progress; every rank calls it.

    Of each parameter group of the optimizer, only the `resumed_entries` are loaded; the others keep this run's values.
    """
    table = _read_checked_by_ranks(checkpoint, grid)
    stored_names = tensors_of(table).keys()
    weights = model_state(stages, grid)
    # Before the load: until then `weights` holds the parameters themselves, by which the optimizer's states are found.
    tensors = requested_tensors(optimizer, weights, stored_names)
    requested = {**requested_weights(weights, stored_names), **scales_to_load(stages, grid, table)}
    loaded = megatron_versions.load(requested, checkpoint, table, grid.groups.dp_cp)
    with reporting_damage(checkpoint):
        _set_weights(stages, loaded)
        set_scales(stages, grid, loaded)
    # A second load: it may need a weight in float32 that the first needs in bf16, and one load reads a name only once.
    targets = {number: shard.data for number, shard in tensors.items()}
    loaded_optimizer = megatron_versions.load({"optimizer_tensors": tensors}, checkpoint, table, grid.groups.dp_cp)
    with reporting_damage(checkpoint):
        for number, target in targets.items():
            loaded_tensor = loaded_optimizer["optimizer_tensors"][number]
            if loaded_tensor.data_ptr() != target.data_ptr():  # another replica has read it and sent it in a new tensor
                target.copy_(loaded_tensor)
        # Plain values, such as the groups' entries and the progress, are loaded without a request.
        set_groups(optimizer, loaded["optimizer"]["param_groups"], resumed_entries)
        progress: dict[str, Any] = loaded["progress"]
    return progress


def load_weights(checkpoint: Path, stages: list[Any], grid: RankGrid) -> None:
    """Load the weights alone of a checkpoint of any layout into the chunks of this rank's pipeline stage."""
    table = _read_checked_by_ranks(checkpoint, grid)
    _set_weights(stages, megatron_versions.load(model_state(stages, grid), checkpoint, table, grid.groups.dp_cp))


def model_state(stages: list[Any], grid: RankGrid) -> dict[str, dict[str, Any]]:
    """Return the parameters of a stage's chunks as sharded tensors, by chunk: {"model0": {name: tensor}, ...}.

    The extra state of Transformer Engine's layers (FP8 scales, see below) is left out, so that a run with these layers
    and a run with local layers load each other's checkpoints.
    """
    states = [chunk.sharded_state_dict(metadata=grid.sharding_metadata) for chunk in stages]
    return {
        f"model{number}": {name: value for name, value in state.items() if not name.endswith(EXTRA_STATE)}
        for number, state in enumerate(states)
    }


def _set_weights(stages: list[Any], loaded: dict[str, Any]) -> None:
    for number, chunk in enumerate(stages):
        chunk.load_state_dict(loaded[f"model{number}"], strict=False)  # the extra state is missing


def _read_checked_by_ranks(checkpoint: Path, grid: RankGrid) -> Table:
    """Verify a share of a checkpoint on each rank, and return the table; every rank calls it.

    Raises CorruptError on all ranks if one of them finds damage, so that none waits for others in the load.
    """
    table: Table | None = None
    problem: CorruptError | None = None
    try:
        table = read_checked(checkpoint, share=grid.rank, shares=grid.world_size)
        saved_progress(checkpoint, table)  # only to find damage in it
    except CorruptError as error:
        problem = error
    problems = [error for error in gather_values(problem) if error is not None]
    if problems:
        # An UnreadableError comes last: the damage that another rank has found may be its cause.
        raise reported_by_main(min(problems, key=lambda error: isinstance(error, UnreadableError)))
    assert table is not None, "this rank has no problem"
    return table


# -- FP8

# The scales of FP8's `delayed` recipe are saved as plain tensors (Transformer Engine would pickle them). They depend on
# past steps, so a resumed run needs them; other recipes compute scales from the current tensor. All ranks of a pipeline
# stage have the same scales, since the largest values are reduced over tensor, context and data parallel ranks. Runs
# without this recipe do not read scales, and load checkpoints that have them.


def scales_to_save(stages: list[Any], grid: RankGrid) -> dict[str, dict[str, ShardedObject]]:
    """Return a state dict of the scales of this rank's chunks; empty unless the recipe is `delayed`."""
    scales = {}
    for shard, layer in _fp8_layers(stages, grid):
        if all(direction in layer.fp8_meta for direction in DIRECTIONS):  # otherwise it has not run in FP8 yet
            tensors = {
                f"{direction}.{name}": getattr(layer.fp8_meta[direction], name).detach().cpu().clone()
                for direction in DIRECTIONS
                for name in TENSORS
            }
            scales[shard.unique_key] = replace(shard, data=tensors)
    return {FP8_SCALES: scales} if scales else {}


def scales_to_load(stages: list[Any], grid: RankGrid, table: Table) -> dict[str, dict[str, ShardedObject]]:
    """Return a state dict, without data, of those scales of this rank's chunks that are in a checkpoint."""
    shards = {shard.unique_key: shard for shard, _ in _fp8_layers(stages, grid)}
    scales = {name: shard for name, shard in shards.items() if name in table.state_dict_metadata}
    return {FP8_SCALES: scales} if scales else {}


@torch.no_grad()
def set_scales(stages: list[Any], grid: RankGrid, loaded: dict[str, Any]) -> None:
    """Copy the scales in a loaded state dict into the layers."""
    from megatron.core.fp8_utils import get_fp8_recipe

    loaded_scales = loaded.get(FP8_SCALES, {})
    for shard, layer in _fp8_layers(stages, grid):
        scales = loaded_scales.get(shard.unique_key)
        if scales is None:
            continue
        recipe = get_fp8_recipe(layer.config)
        layer.fp8_meta.update(recipe=recipe, num_gemms=1)
        layer.init_fp8_meta_tensors(recipe)  # otherwise done by the first forward, which keeps existing ones
        for direction in DIRECTIONS:
            state = layer.fp8_meta[direction]
            state.scale.copy_(scales[f"{direction}.scale"])
            history = scales[f"{direction}.amax_history"]
            kept = min(len(history), len(state.amax_history))  # this run's history may have another length
            state.amax_history[:kept].copy_(history[:kept])


def _fp8_layers(chunks: list[Any], grid: RankGrid) -> Iterator[tuple[ShardedObject, Any]]:
    """Yield (shard, layer) for Transformer Engine's layers; nothing unless the recipe is `delayed`.

    The shard tells where a checkpoint stores the layer's scales: it is the ShardedObject of the layer's `_extra_state`,
    with another key and without data.
    """
    config = chunks[0].config
    if not config.fp8 or config.fp8_recipe != "delayed":
        return
    for chunk in chunks:
        for name, shard in chunk.sharded_state_dict(metadata=grid.sharding_metadata).items():
            if not name.endswith(EXTRA_STATE) or not isinstance(shard, ShardedObject):
                continue
            layer = chunk.get_submodule(name.removesuffix(f".{EXTRA_STATE}"))
            if hasattr(layer, "init_fp8_meta_tensors"):
                yield replace(shard, key=shard.key.removesuffix(EXTRA_STATE) + FP8_SCALES, data=None), layer


# -- the optimizer

# A checkpoint has the optimizer's state in one form for all optimizers and layouts:
#
#     optimizer.state.STATE.WEIGHT    a state of a weight; AdamW has exp_avg and exp_avg_sq
#     optimizer.state.param.WEIGHT    the float32 main weight, unless the weight itself is in float32
#     optimizer/param_groups          hyperparameters and the step, for each group of weights
#
# Each tensor has the shape of its weight. A rank saves and loads in place the part that it holds: the state of all its
# weights, or, with the distributed optimizer, a range of the elements of some weights, which is cut into rectangles.
# Nothing is gathered. (megatron-core's form for all layouts, `fully_reshardable`, gathers on every rank, and saves
# wrong values after a padded bucket: Megatron-LM pull request 5077, seen in 0.16.1 and 0.19.2.)


class _Part(NamedTuple):
    """The optimizer's state for a range of a weight's elements, on this rank."""

    weight: torch.nn.Parameter
    start: int
    """First element of the range."""
    tensors: dict[str, Tensor]
    """Tensors of the range by state; the main weight is `param`, and is missing if the weight is in float32."""
    instance: int | None
    """Number of the distributed optimizer's instance (`num_distributed_optimizer_instances`), whose ranks divide the
    weight; None: every data parallel rank has the state of the whole weight."""


def stored_state(optimizer: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Return the optimizer's state as a sharded state dict; before the first update, the initial state.

    `weights` is the result of `model_state`, whose data are the parameters themselves.
    """
    shards = dict(enumerate(_shards(optimizer, weights)))
    return {"optimizer": {"param_groups": _stored_groups(optimizer)}, "optimizer_tensors": shards}


def requested_tensors(optimizer: Any, weights: dict[str, Any], names: Collection[str]) -> dict[int, ShardedTensor]:
    """Return the optimizer's tensors, to load into, by number, each with its key among a checkpoint's `names`."""
    shards = {}
    for number, shard in enumerate(_shards(optimizer, weights)):
        if shard.key.startswith(MAIN_WEIGHT):  # a checkpoint in float32 has the weight itself instead
            shard = replace(shard, key=main_weight_name(shard.key.removeprefix(MAIN_WEIGHT), names))
        shards[number] = shard
    return shards


def requested_weights(weights: dict[str, Any], stored_names: Collection[str]) -> dict[str, Any]:
    """Return the weights, to load into; a weight in float32 asks for the checkpoint's main weight, if there is one."""

    def with_stored_name(leaf: Any) -> Any:
        is_float32 = leaf.data.dtype == torch.float32
        return replace(leaf, key=main_weight_name(leaf.key, stored_names)) if is_float32 else leaf

    return {chunk: {name: with_stored_name(leaf) for name, leaf in leaves.items()} for chunk, leaves in weights.items()}


def set_groups(optimizer: Any, groups: list[dict[str, Any]], names: Collection[str]) -> None:
    """Set the entries `names`, such as the step, from stored parameter groups; all layouts have them in one order."""
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        group.update({name: stored[name] for name in names})


def _stored_groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return the entries of all parameter groups except `params`, with the same step in all groups.

    Our Adam does not count steps in a group that is empty on this rank, so such a group takes the step from the others.
    """
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    step = max(group.get("step", 0) for group in groups)
    return [{**group, "step": step} for group in groups]


def _parts(optimizer: Any, weights: list[torch.nn.Parameter]) -> Iterator[_Part]:
    """Yield the optimizer's state of each weight, or range of a weight's elements, that this rank updates."""
    for single in getattr(optimizer, "chained_optimizers", [optimizer]):
        # Creates the states that the first update would create, so that every save has the same shards.
        single.init_state_fn(single.optimizer, single.config)
        if isinstance(single, DistributedOptimizer):
            instance = single.distributed_optimizer_instance_id
            # For each buffer, by number format: the buckets, each with this rank's ranges of weights in `param_map`.
            buckets = [bucket for buffer in single.gbuf_ranges for group in buffer.values() for bucket in group]
            starts = {weight: span["param"].start for bucket in buckets for weight, span in bucket["param_map"].items()}
            states = {weight: dict(single._get_main_param_and_optimizer_states(weight)) for weight in starts}
        else:
            instance = None
            updated = {main for group in single.param_groups for main in group["params"]}
            mains = {weight: getattr(weight, "main_param", weight) for weight in weights}
            starts = {weight: 0 for weight, main in mains.items() if main in updated}  # 0: whole weights
            states = {weight: {**single.optimizer.state[mains[weight]], "param": mains[weight]} for weight in starts}
        for weight, start in starts.items():
            tensors = states[weight]
            shapes = {tensor.shape for tensor in tensors.values()}
            assert len(shapes) == 1, f"states of other shapes than the weight's: {list(tensors)}"
            if weight.dtype == torch.float32:  # the weight is its own main weight, and is stored with the weights
                del tensors["param"]
            yield _Part(weight, start, tensors, instance)


def _shards(optimizer: Any, weights: dict[str, Any]) -> Iterator[ShardedTensor]:
    """Yield the parts of the optimizer's state as rectangles of whole tensors, which share the optimizer's memory."""
    pieces_by_weight = {leaf.data: list(local_shards({"": leaf})) for leaf in nested_values(weights)}
    for part in _parts(optimizer, list(pieces_by_weight)):
        for piece in pieces_by_weight[part.weight]:
            for name, tensor in part.tensors.items():
                yield from _rectangles_of(piece, part, f"{STATE_PREFIX}{name}.{piece.key}", tensor.detach().view(-1))


def _rectangles_of(piece: ShardedTensor, part: _Part, key: str, flat: Tensor) -> Iterator[ShardedTensor]:
    """Yield the elements of a part's flattened tensor that lie in a piece of the weight, as shards of the tensor `key`.

    A weight is one piece, unless the checkpoint stores it as several: ranges of its rows or of its columns.
    """
    assert piece.data is not None and part.weight.dim() == piece.data.dim() == len(piece.global_offset) <= 2
    weight_shape = tuple(part.weight.shape)
    elements_before = piece.data.storage_offset() - part.weight.storage_offset()
    # The piece begins in the weight at (row, column) `corner`.
    corner = divmod(elements_before, weight_shape[1]) if len(weight_shape) == 2 else (elements_before,)
    for first, offset, extent in rectangles(weight_shape, part.start, part.start + flat.numel()):
        rectangle = flat.narrow(0, first - part.start, torch.Size(extent).numel()).view(extent)
        # The rectangle and the piece have in common the part of the weight that begins at `low` and ends at `high`.
        low = tuple(map(max, offset, corner))
        high = tuple(map(min, map(add, offset, extent), map(add, corner, piece.data.shape)))
        if any(map(le, high, low)):
            continue  # they have nothing in common: the rectangle belongs to other pieces
        data = rectangle[tuple(map(slice, map(sub, low, offset), map(sub, high, offset)))]
        yield replace(
            piece,
            key=key,
            data=data,
            dtype=data.dtype,
            local_shape=tuple(data.shape),
            global_offset=tuple(map(add, piece.global_offset, map(sub, low, corner))),
            axis_fragmentations=None,  # the shards form no regular grid
            # The last number tells copies of a shard apart: those on data parallel ranks, or one on each instance.
            replica_id=piece.replica_id if part.instance is None else (*piece.replica_id[:2], part.instance),
        )


def rectangles(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield (first element, offset, shape) of the fewest rectangles that cover a range of a tensor's elements.

    Args:
        shape: shape of the tensor, of one or two dimensions.
        start, end: the range, in elements of the flattened tensor.
    """
    columns = shape[-1] if len(shape) == 2 else 1  # a vector is one column
    while start < end:
        row, column = divmod(start, columns)
        whole_rows = 0 if column else (end - start) // columns  # 0: the rectangle is a part of one row
        extent = (whole_rows or 1, columns if whole_rows else min(columns - column, end - start))
        yield start, (row, column)[: len(shape)], extent[: len(shape)]
        start += extent[0] * extent[1]
