"""A run's state as a sharded state dict, to save and to load: weights, optimizer, progress.

Weights and optimizer state have global names, so every layout loads any other's. There are no random states: training
draws nothing, and the order of samples follows from the seed.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_fanformer.checkpoint import megatron_versions, optimizer_state
from megatron_fanformer.checkpoint.data_files import UnreadableError, reporting_damage
from megatron_fanformer.checkpoint.stored_files import Table, read_checked, saved_progress, tensors_of
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.runtime.agreement import of_every_rank, reported_by_main
from megatron_fanformer.runtime.parallel import RankGrid

EXTRA_STATE = "_extra_state"
FP8_SCALES = "fp8_scales"
DIRECTIONS = ("scaling_fwd", "scaling_bwd")
TENSORS = ("scale", "amax_history")


def training_state(stages: list[Any], optimizer: Any, progress: dict[str, Any], grid: RankGrid) -> dict[str, Any]:
    """Return this rank's part of a checkpoint; every rank calls it.

    Args:
        stages: this rank's pipeline stage, as its chunks.
        progress: plain values that the run resumes from, the same on all ranks.
    """
    weights = model_state(stages, grid)
    return {
        **weights,
        **optimizer_state.stored_state(optimizer, weights),
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
    fully_parallel: bool = True,
) -> dict[str, Any]:
    """Load weights and optimizer in place; return the saved progress.

    Args:
        stages: this rank's pipeline stage, as its chunks.
        resumed_entries: entries of the optimizer's parameter groups to load; the others stay this run's.
        fully_parallel: each replica reads a part and sends it to the others.

    Raises:
        CorruptError: the checkpoint is damaged, or holds more than data.
    """
    group = grid.groups.dp_cp if fully_parallel else None
    table = _read_checked(checkpoint, grid)
    stored = tensors_of(table)
    weights = model_state(stages, grid)
    # Looked up by the weights while these are still the parameters themselves: loading detaches them.
    tensors = optimizer_state.requested_tensors(optimizer, weights, stored)
    requested = {**optimizer_state.requested_weights(weights, stored), **scales_to_load(stages, grid, table)}
    loaded = megatron_versions.load(requested, checkpoint, table, group)
    with reporting_damage(checkpoint):
        _set_weights(stages, loaded)
        set_scales(stages, grid, loaded)
    # Separately from the weights, some of which it may need in float32: one load returns a name in one type.
    local = {number: shard.data for number, shard in tensors.items()}
    loaded_optimizer = megatron_versions.load({"optimizer_tensors": tensors}, checkpoint, table, group)
    with reporting_damage(checkpoint):
        optimizer_state.set_tensors(local, loaded_optimizer["optimizer_tensors"])
        groups = optimizer_state.stored_groups(loaded_optimizer["optimizer"])
        optimizer_state.set_groups(optimizer, groups, resumed_entries)
        progress: dict[str, Any] = loaded["progress"]
    return progress


def load_weights(checkpoint: Path, stages: list[Any], grid: RankGrid) -> None:
    """Load only the weights of a stage's chunks, from a checkpoint of any layout.

    Raises:
        CorruptError: the checkpoint is damaged, holds more than data, or another model.
    """
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
