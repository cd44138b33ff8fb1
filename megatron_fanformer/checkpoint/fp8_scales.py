"""The scales of FP8's `delayed` recipe, as plain tensors: they come from past steps, and a resumed run needs them.

(Other recipes take their scales from the current tensor. Transformer Engine's own form of this state is a pickle, which
it refuses to load unless told that the file is trusted.) They differ only between pipeline stages, since their largest
values are reduced over tensor, context and data parallel ranks. No other layer or recipe reads them, so FP8 and other
runs can load each other's checkpoints.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_fanformer.checkpoint.tensor_table import Table
from megatron_fanformer.runtime.parallel import RankGrid

EXTRA_STATE = "_extra_state"
FP8_SCALES = "fp8_scales"
DIRECTIONS = ("scaling_fwd", "scaling_bwd")
TENSORS = ("scale", "amax_history")


def scales_to_save(stages: list[Any], grid: RankGrid) -> dict[str, dict[str, ShardedObject]]:
    """The part of a state dict that holds the scales of this rank's chunks; empty without the recipe."""
    scales = {
        shard.unique_key: replace(shard, data=_captured(layer.fp8_meta))
        for shard, layer in _layers(stages, grid)
        if all(direction in layer.fp8_meta for direction in DIRECTIONS)  # else it has not run in FP8 yet
    }
    return {FP8_SCALES: scales} if scales else {}


def scales_to_load(stages: list[Any], grid: RankGrid, table: Table) -> dict[str, dict[str, ShardedObject]]:
    """The same part of a state dict, for the scales that a checkpoint with this table has; empty if it has none."""
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
    """The layers that may be in FP8, each with a shard of its global name that holds nothing yet."""
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
