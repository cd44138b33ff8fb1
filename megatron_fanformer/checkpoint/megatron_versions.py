"""Saving and loading by megatron-core 0.16 and 0.19: their differences, and the internals that are used, in one place.

Saving: a process that each rank forks writes its part of a checkpoint while training goes on. It sees the rank's memory
as it was at the fork: on a CPU that is the copy which the optimizer, updating in place, cannot reach. (From a GPU
megatron-core copies to host memory first.)

Loading: both versions, and torch under them, unpickle a checkpoint's files, which may execute code: the table
(`FileSystemReader.read_metadata`), `common.pt` (0.16's `TorchCommonLoadStrategy.load_common`, 0.19's `load_common`) and
the objects among the tensors (`DefaultLoadPlanner.load_bytes`, which also reads 0.19's `common_state`). `load` hands
them the table as it was read as data, and makes `torch.load` load data alone.
"""

import dataclasses
import functools
import inspect
import logging
import os
import pickle
import queue
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import process
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
from megatron_fanformer.checkpoint.stored_files import Table, common_values, tensors_of
from megatron_fanformer.processes import end_with_parent

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

MultiStorageClientFeature.disable()  # a checkpoint is a folder here, and its readers are torch's

# 0.19's default writer is nvidia-resiliency-ext's, which may not be installed; 0.16 has only its own.
_WRITER = (
    {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(dist_checkpointing.save).parameters else {}
)

# 0.16 looks for `common.pt` alone, which 0.19 does not write.
_HAS_COMMON_STRATEGY = "common_strategy" in inspect.signature(dist_checkpointing.load).parameters

WRITER_LOGGER = "megatron.core.dist_checkpointing.strategies.filesystem_async"


# -- saving


def prepare_save(sharded_state: dict[str, Any], folder: Path, strategy: Any, *, validate: bool) -> "AsyncRequest":
    """Plan the writing of a sharded state dict into an empty folder, for an AsyncCallsQueue; every rank calls it.

    With `validate`, check that the ranks' shards make whole tensors. The strategy is from `save_strategy`.
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
    """Return a strategy for state dicts of one structure; ranks of `group` divide the writing of replicated tensors."""
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    if group is None or group.size() == 1:
        return strategy
    return FullyParallelSaveStrategyWrapper(strategy, group, do_cache_distribution=True)


class ResultsFile:
    """The queue through which a writer returns its results, as an unnamed file that a fork inherits.

    megatron-core's own queue is in a server process, which takes seconds to start, imports `__main__` again, and is
    killed by a signal sent to a run's whole process group: the last checkpoint, which that signal requested, would be
    lost. The pickle in the file is trusted: only this process's own fork can write it.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process

    def put(self, results: Any) -> None:
        """Write results."""
        pickle.dump(results, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        """Return the results; if there are none, an exception, which megatron-core treats as a failure."""
        self._file.seek(0)
        try:
            return pickle.load(self._file)
        except (EOFError, pickle.UnpicklingError):
            return RuntimeError("its writer was killed")
        finally:
            self._file.seek(0)
            self._file.truncate()


def watched(write: Callable[[int, Any, Any], None]) -> Callable[[int, Any, Any], None]:
    """Wrap megatron-core's writer, called in a forked process, so that it always ends and reports why it failed.

    Unwrapped, it waits forever if a process that it starts (in 0.16) is killed, reports errors to a log, not to the
    rank (in 0.19), and outlives a rank that is killed, whose port it keeps.
    """
    return functools.partial(_watch, write)


def _watch(write: Callable[[int, Any, Any], None], rank: int, buckets: Any, results: Any) -> None:
    signal.signal(signal.SIGCHLD, _end_if_child_was_killed)
    end_with_parent()
    os.register_at_fork(after_in_child=end_with_parent)
    errors: list[str] = []

    def collect_error(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            errors.append(record.getMessage())
        return False  # it is logged nowhere else

    logging.getLogger(WRITER_LOGGER).addFilter(collect_error)
    local: queue.SimpleQueue[Any] = queue.SimpleQueue()
    try:
        write(rank, buckets, local)
        outcome = local.get()
    except Exception as error:
        outcome = error
    results.put(RuntimeError(errors[0]) if isinstance(outcome, Exception) and errors else outcome)


def _end_if_child_was_killed(*_: Any) -> None:
    children = list(vars(process)["_children"])  # active_children() omits those that ended
    if any(child.exitcode for child in children):
        for child in children:
            child.kill()
        os._exit(1)


# -- loading


def load(
    sharded_state: dict[str, Any], folder: Path, table: Table, group: "dist.ProcessGroup | None" = None
) -> dict[str, Any]:
    """Load a sharded state dict from a checkpoint, as data alone; every rank calls it.

    Ranks of `group` share the reading of replicated tensors. CorruptError for a file that holds more than data.
    """
    strategy = TorchDistLoadShardedStrategy()
    if group is not None and group.size() > 1:
        strategy = FullyParallelLoadStrategyWrapper(strategy, group)
    for stored in tensors_of(table).values():  # megatron-core passes them all to `torch.empty`
        for name in vars(stored.properties).keys() - _PROPERTIES:  # torch 2.15 adds a tensor's strides
            delattr(stored.properties, name)  # the class has its default
    with reporting_damage(folder, also=(CheckpointingException,)), _reading_data_alone(table):
        wanted = _with_contiguous_data(sharded_state)
        common = {"common_strategy": _common_strategy(table)} if _HAS_COMMON_STRATEGY else {}
        try:
            return dist_checkpointing.load(
                wanted, str(folder), sharded_strategy=strategy, strict="raise_unexpected", **common
            )
        except CheckpointException as error:  # which every rank raises when one fails: its cause is raised
            raise next(cause for cause, _ in error.failures.values()) from None


def _common_strategy(table: Table) -> Any:
    """Return the strategy by which 0.16 loads the values common to all ranks, wherever they are stored."""
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy

    class CommonValues(TorchCommonLoadStrategy):
        def load_common(self, checkpoint_dir: str | Path) -> Any:
            return common_values(Path(checkpoint_dir), table)[1]

    return CommonValues()


_PROPERTIES = {"dtype", "layout", "requires_grad", "memory_format", "pin_memory"}
"""The properties of tensors that `torch.empty` takes."""


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
    """While the block runs, make every reader return this table, and `torch.load` load data alone.

    Class attributes are replaced, since megatron-core makes its readers and planners itself.
    """
    read_metadata, load_archive = FileSystemReader.read_metadata, torch.load

    def known_table(reader: FileSystemReader) -> Table:
        table.storage_meta = StorageMeta(load_id=reader.load_id)
        return table

    def load_data(*arguments: Any, **options: Any) -> Any:
        return load_archive(*arguments, **{**options, "weights_only": True})

    FileSystemReader.read_metadata = known_table  # type: ignore[assignment,method-assign]
    torch.load = load_data
    try:
        yield
    finally:
        FileSystemReader.read_metadata = read_metadata  # type: ignore[method-assign]
        torch.load = load_archive
