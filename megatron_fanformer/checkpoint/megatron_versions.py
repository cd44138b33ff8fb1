"""The one place that knows how megatron-core 0.16 and 0.19 differ in saving, and what of its inside is used."""

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

from megatron_fanformer.checkpoint.writer import ResultsFile

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

# 0.19's default writer is nvidia-resiliency-ext's, which need not be there; 0.16 knows no other than its own.
_WRITER = (
    {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters else {}
)


def prepare_save(sharded_state: dict[str, Any], folder: Path, strategy: Any, *, validate: bool) -> "AsyncRequest":
    """Plan the writing of a sharded state dict into an empty folder, for an AsyncCallsQueue to do; every rank calls it.

    Args:
        strategy: of `save_strategy`.
        validate: check that the ranks' shards make whole tensors.
    """
    _keep_results_in_a_file()
    return dist_checkpointing.save(
        sharded_state,
        str(folder),
        sharded_strategy=strategy,
        validate_access_integrity=validate,
        async_sharded_save=True,
        **_WRITER,
    )


def save_strategy(group: "dist.ProcessGroup | None") -> Any:
    """How to save state dicts of one structure; the ranks of `group` share the writing of what is the same on them."""
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    if group is None or group.size() == 1:
        return strategy
    return FullyParallelSaveStrategyWrapper(strategy, group, do_cache_distribution=True)


def load(sharded_state: dict[str, Any], folder: Path, group: "dist.ProcessGroup | None" = None) -> dict[str, Any]:
    """Read what a sharded state dict names out of a checkpoint; every rank calls it.

    Args:
        group: ranks that share the reading of what is the same on them.
    """
    strategy = TorchDistLoadShardedStrategy()
    if group is not None and group.size() > 1:
        strategy = FullyParallelLoadStrategyWrapper(strategy, group)
    return dist_checkpointing.load(sharded_state, str(folder), sharded_strategy=strategy, strict="raise_unexpected")


def _keep_results_in_a_file() -> None:
    """megatron-core would start a server process for the writer's results; see ResultsFile."""
    if not isinstance(filesystem_async._results_queue, ResultsFile):
        filesystem_async._results_queue = ResultsFile()
