"""Differences of saving between megatron-core 0.16 and 0.19, and the internals of it that are used; in one place.

Reading: both, and torch under them, treat a checkpoint's files as pickles that may be executed: its table
(`FileSystemReader.read_metadata`), `common.pt` (0.16's `TorchCommonLoadStrategy.load_common`, 0.19's `load_common`) and
the objects among the tensors (`DefaultLoadPlanner.load_bytes`, which reads 0.19's `common_state`, too). `load` hands
them the table as it was read as data, and lets `torch.load` load nothing but data.
"""

import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from megatron.core.msc_utils import MultiStorageClientFeature
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import StorageMeta

from megatron_fanformer.checkpoint.data_files import reporting_damage
from megatron_fanformer.checkpoint.stored_files import common_values
from megatron_fanformer.checkpoint.tensor_table import Table, tensors_of
from megatron_fanformer.checkpoint.writer import ResultsFile

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

MultiStorageClientFeature.disable()  # its readers are others: a checkpoint is a folder here

# 0.19's default writer is nvidia-resiliency-ext's, which may not be installed; 0.16 has only its own.
_WRITER = (
    {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters else {}
)

# 0.16 looks for `common.pt` alone, which 0.19 does not write.
_HAS_COMMON_STRATEGY = "common_strategy" in inspect.signature(dist_checkpointing.load).parameters


def prepare_save(sharded_state: dict[str, Any], folder: Path, strategy: Any, *, validate: bool) -> "AsyncRequest":
    """Plan the writing of a sharded state dict into an empty folder, for an AsyncCallsQueue; every rank calls it.

    Args:
        strategy: of `save_strategy`.
        validate: check that the ranks' shards make whole tensors.
    """
    if not isinstance(filesystem_async._results_queue, ResultsFile):  # else it starts a server process for the results
        filesystem_async._results_queue = ResultsFile()
    return dist_checkpointing.save(
        sharded_state,
        str(folder),
        sharded_strategy=strategy,
        validate_access_integrity=validate,
        async_sharded_save=True,
        **_WRITER,
    )


def save_strategy(group: "dist.ProcessGroup | None") -> Any:
    """Return the strategy for state dicts of one structure; ranks of `group` divide the writing of common tensors."""
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    if group is None or group.size() == 1:
        return strategy
    return FullyParallelSaveStrategyWrapper(strategy, group, do_cache_distribution=True)


def load(
    sharded_state: dict[str, Any], folder: Path, table: Table, group: "dist.ProcessGroup | None" = None
) -> dict[str, Any]:
    """Load a sharded state dict from a checkpoint, as data alone; every rank calls it.

    Args:
        table: the checkpoint's, as `read_table` gives it.
        group: ranks that share the reading of common tensors.

    Raises:
        CorruptError: a file is damaged, or holds more than data; names it.
    """
    strategy = TorchDistLoadShardedStrategy()
    if group is not None and group.size() > 1:
        strategy = FullyParallelLoadStrategyWrapper(strategy, group)
    _leave_out_what_is_unknown(table)
    with reporting_damage(folder, also=(CheckpointingException,)), _raising_cause(), _reading_data_alone(table):
        wanted = _with_contiguous_data(sharded_state)
        common = {"common_strategy": _common_strategy(table)} if _HAS_COMMON_STRATEGY else {}
        return dist_checkpointing.load(
            wanted, str(folder), sharded_strategy=strategy, strict="raise_unexpected", **common
        )


def _common_strategy(table: Table) -> Any:
    """Return the strategy by which 0.16 loads the values common to all ranks, wherever they are stored."""
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy

    class CommonValues(TorchCommonLoadStrategy):
        def load_common(self, checkpoint_dir: str | Path) -> Any:
            return common_values(Path(checkpoint_dir), table)[1]

    return CommonValues()


_PROPERTIES = {"dtype", "layout", "requires_grad", "memory_format", "pin_memory"}


def _leave_out_what_is_unknown(table: Table) -> None:
    """Leave the properties of tensors that `torch.empty` takes: megatron-core hands it all that a table has.

    torch 2.15 writes a tensor's strides among them, which it knows no use for in reading.
    """
    for stored in tensors_of(table).values():
        for name in vars(stored.properties).keys() - _PROPERTIES:
            delattr(stored.properties, name)  # the class has its default


def _with_contiguous_data(sharded_state: dict[str, Any]) -> dict[str, Any]:
    """Replace strided tensors, such as a range of a weight's columns, by contiguous ones to read into.

    megatron-core broadcasts what one rank has read for others, and over gloo a strided tensor arrives scrambled.
    """

    def contiguous(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensorFactory):
            build = leaf.build_fn
            return dataclasses.replace(leaf, build_fn=lambda *of: dict_list_map_outplace(contiguous, build(*of)))
        if isinstance(leaf, ShardedTensor) and leaf.data is not None and not leaf.data.is_contiguous():
            return dataclasses.replace(leaf, data=leaf.data.contiguous())
        return leaf

    return dict_list_map_outplace(contiguous, sharded_state)


@contextmanager
def _reading_data_alone(table: Table) -> Iterator[None]:
    """While the block runs, every checkpoint has this table, and `torch.load` loads data alone.

    The method itself is replaced, not the object: megatron-core makes its readers and planners out of reach.
    """
    read_metadata, load_archive = FileSystemReader.read_metadata, torch.load

    def table_as_read(reader: FileSystemReader) -> Table:
        table.storage_meta = StorageMeta(load_id=reader.load_id)
        return table

    def load_data(*arguments: Any, **options: Any) -> Any:
        return load_archive(*arguments, **{**options, "weights_only": True})

    FileSystemReader.read_metadata = table_as_read  # type: ignore[assignment,method-assign]
    torch.load = load_data
    try:
        yield
    finally:
        FileSystemReader.read_metadata = read_metadata  # type: ignore[method-assign]
        torch.load = load_archive


@contextmanager
def _raising_cause() -> Iterator[None]:
    """Raise the cause of torch's exception, which every rank gets when one fails, in its place."""
    try:
        yield
    except CheckpointException as error:
        raise next(cause for cause, _ in error.failures.values()) from None
