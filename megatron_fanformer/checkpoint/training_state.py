"""A run's state as a sharded state dict, to save and to load: weights, optimizer, progress and random states.

The weights and the optimizer's state have global names, so any layout loads any other's; random states belong to a
rank and are restored where the layout is the same.
"""

import random
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_fanformer.checkpoint import megatron_versions, optimizer_state, run_folder
from megatron_fanformer.checkpoint.data_files import reporting_damage
from megatron_fanformer.checkpoint.stored_files import read_checked, saved_progress
from megatron_fanformer.checkpoint.tensor_table import Table, tensors_of
from megatron_fanformer.checkpoint.versions import UnreadableError
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.runtime.agreement import of_every_rank, reported_by_main
from megatron_fanformer.runtime.parallel import RankGrid

LAYOUT_FIELDS = (
    ("parallel", "tensor_model_parallel_size"),
    ("parallel", "pipeline_model_parallel_size"),
    ("parallel", "context_parallel_size"),
    ("parallel", "data_parallel_size"),
    ("runtime", "device"),
)
"""The fields that the ranks' random states depend on."""

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
        "random": _random_state(grid, capture=True),
        **scales_to_save(stages, grid),
    }


def load_training_state(
    checkpoint: Path,
    *,
    stages: list[Any],
    optimizer: Any,
    config: dict[str, Any],
    grid: RankGrid,
    resumed_entries: Collection[str],
    fully_parallel: bool = True,
) -> dict[str, Any]:
    """Load weights, optimizer and random states in place; return the saved progress.

    Args:
        stages: this rank's pipeline stage, as its chunks.
        config: the run's resolved configuration.
        resumed_entries: entries of the optimizer's parameter groups to load; the others stay this run's.
        fully_parallel: each replica reads a part and sends it to the others.

    Raises:
        CorruptError: the checkpoint is damaged, or holds more than data.
    """
    saved = run_folder.saved_config(checkpoint)
    group = grid.groups.dp_cp if fully_parallel else None
    table = _read_checked(checkpoint, grid)
    stored = tensors_of(table)
    weights = model_state(stages, grid)
    # Looked up by the weights while these are still the parameters themselves: loading detaches them.
    tensors = optimizer_state.requested_tensors(optimizer, weights, stored)
    wanted = optimizer_state.requested_weights(weights, stored)
    if same_layout := _is_same_layout(saved, config):
        wanted["random"] = _random_state(grid, capture=False)
    wanted.update(scales_to_load(stages, grid, table))
    loaded = megatron_versions.load(wanted, checkpoint, table, group)
    with reporting_damage(checkpoint):
        _set_weights(stages, loaded)
        set_scales(stages, grid, loaded)
    # Separately from the weights, some of which it may need in float32: one load returns a name in one type.
    own = {number: shard.data for number, shard in tensors.items()}
    of_optimizer = megatron_versions.load({"optimizer_tensors": tensors}, checkpoint, table, group)
    with reporting_damage(checkpoint):
        optimizer_state.set_tensors(own, of_optimizer["optimizer_tensors"])
        groups = optimizer_state.stored_groups(of_optimizer["optimizer"])
        optimizer_state.set_groups(optimizer, groups, resumed_entries)
        if same_layout:
            _restore_random_state(loaded["random"])
        progress = loaded["progress"]
    if run_folder.step_of(checkpoint) not in (None, progress["step"]):
        raise reported_by_main(
            CorruptError(f"{checkpoint} holds step {progress['step']}, another than its name says; rename it")
        )
    return progress


def _is_same_layout(saved: dict[str, Any], present: dict[str, Any]) -> bool:
    return all(saved.get(section, {}).get(name, 1) == present[section][name] for section, name in LAYOUT_FIELDS)


def load_weights(checkpoint: Path, stages: list[Any], grid: RankGrid) -> None:
    """Load the weights of a stage's chunks alone, from a checkpoint of any layout.

    Raises:
        CorruptError: the checkpoint is damaged, holds more than data, or another model.
    """
    table = _read_checked(checkpoint, grid)
    loaded = megatron_versions.load(model_state(stages, grid), checkpoint, table, grid.groups.dp_cp)
    _set_weights(stages, loaded)


def model_state(stages: list[Any], grid: RankGrid) -> dict[str, dict[str, Any]]:
    """Return the parameters of a stage's chunks as sharded tensors, by chunk: {"model0": {name: tensor}, ...}.

    Their global names are those of the layers, whichever chunk they are in. Layers' extra state (None here;
    Transformer Engine's FP8 scales, see below) is left out: local and Transformer Engine layers load each
    other's checkpoints.
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
    """Return the table of a checkpoint that is as it was written and holds nothing but data; each rank checks a share
    of it.

    If one rank refuses it, all do: none is left waiting in the load, which is collective.
    """
    table = None
    refused: CorruptError | None = None
    try:
        table = read_checked(checkpoint, share=grid.rank, shares=grid.world_size)
        saved_progress(checkpoint, table)
    except CorruptError as error:
        refused = error
    # Damage first: it may be the reason why another rank could not read.
    for reason in sorted(filter(None, of_every_rank(refused)), key=lambda reason: isinstance(reason, UnreadableError)):
        raise reported_by_main(reason)
    assert table is not None, "else this rank would have refused"
    return table


def _random_state(grid: RankGrid, *, capture: bool) -> ShardedObject:
    state = _capture_random_state() if capture else None
    return ShardedObject("random", state, (grid.world_size,), (grid.rank,))


def _capture_random_state() -> dict[str, Any]:
    """Return plain values and tensors alone, so that they load without unpickling anything else."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tensor_parallel": _plain_states(get_cuda_rng_tracker().get_states()),
    }


def _plain_states(states: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the random states without CUDA graphs' own, which are not values; nothing in training draws from them."""
    return {name: state for name, state in states.items() if isinstance(state, torch.Tensor)}


def _restore_random_state(state: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    tracker = get_cuda_rng_tracker()
    if _plain_states(tracker.get_states()).keys() == state["tensor_parallel"].keys():
        tracker.set_states(state["tensor_parallel"])
    torch.cuda.set_rng_state(state["device"])
    torch.set_rng_state(state["torch"])


# -- FP8

# The scales of FP8's `delayed` recipe, as plain tensors: they come from past steps, and a resumed run needs them.
# (Other recipes take their scales from the current tensor. Transformer Engine's own form of this state is a pickle,
# which it refuses to load unless told that the file is trusted.) They differ only between pipeline stages, since their
# largest values are reduced over tensor, context and data parallel ranks. No other layer or recipe reads them, so FP8
# and other runs can load each other's checkpoints.


def scales_to_save(stages: list[Any], grid: RankGrid) -> dict[str, dict[str, ShardedObject]]:
    """Return the part of a state dict that holds the scales of this rank's chunks; empty without the recipe."""
    scales = {
        shard.unique_key: replace(shard, data=_captured(layer.fp8_meta))
        for shard, layer in _layers(stages, grid)
        if all(direction in layer.fp8_meta for direction in DIRECTIONS)  # else it has not run in FP8 yet
    }
    return {FP8_SCALES: scales} if scales else {}


def scales_to_load(stages: list[Any], grid: RankGrid, table: Table) -> dict[str, dict[str, ShardedObject]]:
    """Return the same part of a state dict, for the scales that a checkpoint with this table has; empty if it has
    none.
    """
    wanted = {shard.unique_key: shard for shard, _ in _layers(stages, grid)}
    scales = {name: shard for name, shard in wanted.items() if name in table.state_dict_metadata}
    return {FP8_SCALES: scales} if scales else {}


def set_scales(stages: list[Any], grid: RankGrid, loaded: dict[str, Any]) -> None:
    """Give the layers the scales in a loaded state dict."""
    scales = loaded.get(FP8_SCALES, {})
    for shard, layer in _layers(stages, grid):
        if shard.unique_key in scales:
            _set(layer, scales[shard.unique_key])


def _layers(stages: list[Any], grid: RankGrid) -> Iterator[tuple[ShardedObject, Any]]:
    """Yield the layers that may be in FP8, each with a shard of its global name that holds nothing yet."""
    config = stages[0].config
    if not config.fp8 or config.fp8_recipe != "delayed":
        return
    for chunk in stages:
        for name, shard in chunk.sharded_state_dict(metadata=grid.sharding_metadata).items():
            layer = chunk.get_submodule(name.removesuffix(f".{EXTRA_STATE}")) if name.endswith(EXTRA_STATE) else None
            if hasattr(layer, "init_fp8_meta_tensors") and isinstance(shard, ShardedObject):
                yield replace(shard, key=shard.key.removesuffix(EXTRA_STATE) + FP8_SCALES, data=None), layer


def _captured(meta: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"{direction}.{name}": getattr(meta[direction], name).detach().cpu().clone()
        for direction in DIRECTIONS
        for name in TENSORS
    }


@torch.no_grad()
def _set(layer: Any, scales: dict[str, torch.Tensor]) -> None:
    from megatron.core.fp8_utils import get_fp8_recipe

    recipe = get_fp8_recipe(layer.config)
    layer.fp8_meta.update(recipe=recipe, num_gemms=1)
    layer.init_fp8_meta_tensors(recipe)  # the first forward would make them, and keeps existing ones
    for direction in DIRECTIONS:
        state = layer.fp8_meta[direction]
        state.scale.copy_(scales[f"{direction}.scale"])
        history = scales[f"{direction}.amax_history"]
        kept = min(len(history), len(state.amax_history))  # the run may use another length by now
        state.amax_history[:kept].copy_(history[:kept])
