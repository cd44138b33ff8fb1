"""The one place that knows how megatron-core 0.16 and 0.19 differ in saving."""

import inspect
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing


def save(sharded_state: dict[str, Any], folder: Path) -> None:
    """Write a sharded state dict into an empty folder; every rank calls it."""
    arguments: dict[str, Any] = {}
    if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        # 0.19's default writer is nvidia-resiliency-ext's, which need not be there
        arguments["async_strategy"] = "mcore"
    dist_checkpointing.save(sharded_state, str(folder), **arguments)


def load(sharded_state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Read what a sharded state dict names out of a checkpoint; every rank calls it."""
    return dist_checkpointing.load(sharded_state, str(folder), strict="raise_unexpected")
