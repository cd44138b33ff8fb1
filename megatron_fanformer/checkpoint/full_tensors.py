"""A checkpoint's weights as whole tensors under their global names, for conversion; needs one process only."""

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_fanformer.checkpoint import megatron_versions, store
from megatron_fanformer.errors import CorruptError

OPTIMIZER_PREFIX = "optimizer."


def read_full_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every weight of a checkpoint of any layout, whole; the optimizer's state is not read.

    Raises:
        CorruptError: the checkpoint is damaged.
    """
    try:
        stored = dist_checkpointing.load_tensors_metadata(str(checkpoint))
        weights = {name: value for name, value in stored.items() if not name.startswith(OPTIMIZER_PREFIX)}
        loaded = dist_checkpointing.load(weights, str(checkpoint), validate_access_integrity=False)
    except torch.OutOfMemoryError:  # not the checkpoint's fault
        raise
    except (CheckpointingException, OSError, RuntimeError, KeyError, ValueError) as error:
        raise CorruptError(f"{checkpoint} cannot be read ({error}); take an earlier checkpoint") from error
    return {name: loaded[name] for name in weights}


def write_full_tensors(
    run: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], attachments: list[Path]
) -> Path:
    """Publish whole tensors as the checkpoint of step 0 of a run's folder, for any layout to load."""
    checkpoints = run / store.CHECKPOINTS
    folder = store.temporary_folder(checkpoints, 0)
    sharded = {name: ShardedTensor.from_rank_offsets(name, tensor.contiguous()) for name, tensor in tensors.items()}
    megatron_versions.save(sharded, folder)
    return store.publish(folder, checkpoints, 0, config, attachments=attachments)
