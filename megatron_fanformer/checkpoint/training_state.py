"""Saves and loads all that a run is: weights, optimizer, progress and random states, in megatron-core's torch_dist.

The weights and the optimizer's state stand under global names, so that any layout loads any other's; random states
belong to a rank and come back where the layout is the same.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_fanformer.checkpoint import megatron_versions, store
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.runtime.parallel import RankGrid

LAYOUT_FIELDS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size", "device")


def save_training_state(
    run: Path,
    *,
    step: int,
    stage: Any,
    optimizer: Any,
    progress: dict[str, Any],
    config: dict[str, Any],
    grid: RankGrid,
    keep: int | None,
    attachments: list[Path],
) -> Path:
    """Write and publish the checkpoint of a step; every rank calls it, and returns when it is published.

    Args:
        progress: plain values that the run goes on from.
        config: the run's resolved configuration, written into the checkpoint.
        keep: how many checkpoints to keep; None for all.
        attachments: small files (a tokenizer) to copy into the checkpoint.
    """
    checkpoints = run / store.CHECKPOINTS
    folder = [store.temporary_folder(checkpoints, step) if grid.is_main else None]
    dist.broadcast_object_list(folder, src=0)
    assert folder[0] is not None
    state = model_state(stage, grid)
    sharded = {
        "model": state,
        "optimizer": optimizer.sharded_state_dict(state, metadata=grid.sharding_metadata),
        "progress": progress,
        "random": _random_state(grid, capture=True),
    }
    megatron_versions.save(sharded, folder[0])
    dist.barrier()
    if grid.is_main:
        store.publish(folder[0], checkpoints, step, config, keep, attachments)
    dist.barrier()
    return checkpoints / store.checkpoint_name(step)


def load_training_state(
    checkpoint: Path,
    *,
    stage: Any,
    optimizer: Any,
    config: dict[str, Any],
    grid: RankGrid,
    amend_optimizer_state: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Load weights, optimizer and random states in place; returns the saved progress.

    Args:
        config: the run's resolved configuration.
        amend_optimizer_state: changes the loaded optimizer state before it is taken over.

    Raises:
        InputError: the checkpoint was saved with another form of optimizer.
        CorruptError: the checkpoint is damaged.
    """
    saved = store.saved_config(checkpoint)
    _check_optimizer_form(checkpoint, saved, config)
    state = model_state(stage, grid)
    sharded: dict[str, Any] = {
        "model": state,
        "optimizer": optimizer.sharded_state_dict(state, is_loading=True, metadata=grid.sharding_metadata),
    }
    same_layout = all(saved["parallel"].get(name) == config["parallel"][name] for name in LAYOUT_FIELDS)
    if same_layout:
        sharded["random"] = _random_state(grid, capture=False)
    loaded = _load(checkpoint, sharded)
    stage.load_state_dict(loaded["model"], strict=False)
    amend_optimizer_state(loaded["optimizer"])
    optimizer.load_state_dict(loaded["optimizer"])
    if same_layout:
        _restore_random_state(loaded["random"])
    return loaded["progress"]


def load_weights(checkpoint: Path, stage: Any, grid: RankGrid) -> None:
    """Load a stage's weights alone, from a checkpoint of any layout.

    Raises:
        CorruptError: the checkpoint is damaged, or holds another model.
    """
    loaded = _load(checkpoint, {"model": model_state(stage, grid)})
    stage.load_state_dict(loaded["model"], strict=False)


def model_state(stage: Any, grid: RankGrid) -> dict[str, Any]:
    """A stage's parameters as sharded tensors, under one global name a layer.

    Layers' extra state (None here; Transformer Engine's FP8 scales) is left out: local and Transformer Engine layers
    load each other's checkpoints.
    """
    state = stage.sharded_state_dict(metadata=grid.sharding_metadata)
    return {name: value for name, value in state.items() if not name.endswith("_extra_state")}


def _load(checkpoint: Path, sharded: dict[str, Any]) -> dict[str, Any]:
    try:
        return megatron_versions.load(sharded, checkpoint)
    except (torch.OutOfMemoryError, dist.DistError):  # not the checkpoint's fault
        raise
    except (CheckpointingException, OSError, RuntimeError, KeyError, ValueError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CorruptError(f"{checkpoint} cannot be loaded ({reason[0]}); take an earlier checkpoint") from error


def _check_optimizer_form(checkpoint: Path, saved: dict[str, Any], config: dict[str, Any]) -> None:
    form = saved["parallel"]["use_distributed_optimizer"]
    if form != config["parallel"]["use_distributed_optimizer"]:
        raise InputError(
            f"{checkpoint} was saved with parallel.use_distributed_optimizer {str(form).lower()}, whose state has "
            "another form; set it to that, or start from the weights alone with checkpoint.load"
        )


def _random_state(grid: RankGrid, *, capture: bool) -> ShardedObject:
    state = _capture_random_state() if capture else None
    return ShardedObject("random", state, (grid.world_size,), (grid.rank,))


def _capture_random_state() -> dict[str, Any]:
    """Plain values and tensors alone, so that they load without unpickling anything else."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tensor_parallel": get_cuda_rng_tracker().get_states(),
    }


def _restore_random_state(state: dict[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    get_cuda_rng_tracker().set_states(state["tensor_parallel"])
    torch.cuda.set_rng_state(state["device"])
    torch.set_rng_state(state["torch"])
