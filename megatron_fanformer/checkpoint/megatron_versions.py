"""Saving and loading by megatron-core 0.16 and 0.19, with the bridges over their differences.

Saving: each rank forks a process that writes the rank's part of a checkpoint while training goes on. The process sees
the rank's memory as it was at the fork, so updates of the weights do not change what it writes. (megatron-core copies
tensors from a GPU to host memory first.)

Loading: megatron-core and torch unpickle a checkpoint's files, which may execute code: the table
(`FileSystemReader.read_metadata`), `common.pt` (0.16's `TorchCommonLoadStrategy.load_common`, 0.19's `load_common`) and
the objects in the table (`DefaultLoadPlanner.load_bytes`, which also reads 0.19's `common_state`). `load` makes
megatron-core use the table that `read_table` has read, and makes `torch.load` load data alone.
"""

import dataclasses
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
from unittest import mock

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

MultiStorageClientFeature.disable()  # checkpoints are local folders

# 0.19's default writer is nvidia-resiliency-ext's, which may not be installed; 0.16 has no such choice.
_HAS_WRITER_CHOICE = "async_strategy" in inspect.signature(dist_checkpointing.save).parameters

# 0.16 reads the plain values from `common.pt`, which 0.19 does not write.
_HAS_COMMON_STRATEGY = "common_strategy" in inspect.signature(dist_checkpointing.load).parameters
_TENSOR_PROPERTIES = {"dtype", "layout", "requires_grad", "memory_format", "pin_memory"}  # arguments of `torch.empty`

WRITER_LOGGER = "megatron.core.dist_checkpointing.strategies.filesystem_async"


# -- saving


def prepare_save(sharded_state: dict[str, Any], folder: Path, strategy: Any, *, validate: bool) -> "AsyncRequest":
    """Return the request, for an AsyncCallsQueue, to write a sharded state dict into an empty folder.

    Every rank calls it. With `validate`, check that the shards of all ranks make whole tensors.
    """
    if not isinstance(filesystem_async._results_queue, ResultsFile):  # the class's docstring has the reasons
        filesystem_async._results_queue = ResultsFile()
    return dist_checkpointing.save(
        sharded_state,
        str(folder),
        sharded_strategy=strategy,
        validate_access_integrity=validate,
        async_sharded_save=True,
        **({"async_strategy": "mcore"} if _HAS_WRITER_CHOICE else {}),
    )


def save_strategy(group: "dist.ProcessGroup | None") -> Any:
    """Return a strategy for saves that all have the same shards; the ranks of `group` divide shards that all hold."""
    strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
    if group is None or group.size() == 1:
        return strategy
    return FullyParallelSaveStrategyWrapper(strategy, group, do_cache_distribution=True)


class ResultsFile:
    """A queue through which a writer returns its results to its rank: an unnamed file, which the fork inherits.

    megatron-core's own queue is in a server process, which takes seconds to start, imports `__main__` again, and is
    killed by a signal sent to a run's whole process group: the last checkpoint, which that signal requested, would be
    lost. The pickle in the file is trusted: only a fork of this process can write it.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process

    def put(self, results: Any) -> None:
        """Write the results of a writer."""
        pickle.dump(results, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        """Remove and return the results; if there are none, return an exception (a failed writer also returns one)."""
        self._file.seek(0)
        try:
            return pickle.load(self._file)
        except (EOFError, pickle.UnpicklingError):
            return RuntimeError("its writer was killed")
        finally:
            self._file.seek(0)
            self._file.truncate()


def run_writer(write: Callable[[int, Any, Any], None], rank: int, buckets: Any, results: Any) -> None:
    """Call megatron-core's writer in a forked process, so that it always ends and reports why it failed.

    Called directly, the writer would wait forever if a process that it starts (in 0.16) is killed, would report errors
    to a log and not to the rank (in 0.19), and would outlive a killed rank and keep the rank's port.
    """
    signal.signal(signal.SIGCHLD, _end_if_child_was_killed)
    end_with_parent()
    os.register_at_fork(after_in_child=end_with_parent)
    errors: list[str] = []

    def collect_error(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            errors.append(record.getMessage())
        return False  # the rank reports it instead

    logging.getLogger(WRITER_LOGGER).addFilter(collect_error)
    outcomes: queue.SimpleQueue[Any] = queue.SimpleQueue()
    try:
        write(rank, buckets, outcomes)
        outcome = outcomes.get()
    except Exception as error:
        outcome = error
    results.put(RuntimeError(errors[0]) if isinstance(outcome, Exception) and errors else outcome)


def _end_if_child_was_killed(*_: Any) -> None:
    """As the handler of SIGCHLD, end this process and its children if a child has failed."""
    children = list(vars(process)["_children"])  # active_children() omits children that have ended
    if any(child.exitcode for child in children):
        for child in children:
            child.kill()
        os._exit(1)


# -- loading


def load(
    sharded_state: dict[str, Any], folder: Path, table: Table, group: "dist.ProcessGroup | None" = None
) -> dict[str, Any]:
    """Load a sharded state dict from a checkpoint, as data alone; every rank calls it.

    The ranks of `group` divide the reading of the tensors that all of them need. Raises CorruptError if a file is
    damaged or holds more than data.
    """
    strategy = TorchDistLoadShardedStrategy()
    if group is not None and group.size() > 1:
        strategy = FullyParallelLoadStrategyWrapper(strategy, group)
    for stored in tensors_of(table).values():  # megatron-core passes all their properties to `torch.empty`
        for name in vars(stored.properties).keys() - _TENSOR_PROPERTIES:  # torch 2.15 adds a tensor's strides
            delattr(stored.properties, name)  # without it, the class's default is in effect
    common = {"common_strategy": _common_strategy(table)} if _HAS_COMMON_STRATEGY else {}
    with reporting_damage(folder, also=(CheckpointingException,)), _reading_data_alone(table):
        try:
            return dist_checkpointing.load(
                _with_contiguous_data(sharded_state),
                str(folder),
                sharded_strategy=strategy,
                strict="raise_unexpected",
                **common,
            )
        except CheckpointException as error:  # every rank raises it if one fails, with the errors of the failed ranks
            raise next(cause for cause, _ in error.failures.values()) from None


def _common_strategy(table: Table) -> Any:
    """Return a strategy by which 0.16 loads the plain values of a checkpoint of either version."""
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy

    class PlainValues(TorchCommonLoadStrategy):
        def load_common(self, checkpoint_dir: str | Path) -> Any:
            return common_values(Path(checkpoint_dir), table)[1]  # [0] is the name of their file

    return PlainValues()


def _with_contiguous_data(sharded_state: dict[str, Any]) -> dict[str, Any]:
    """Return a sharded state dict in which contiguous tensors replace strided ones, such as columns of a weight.

    One rank reads a tensor and broadcasts it to the others, and over gloo a strided tensor arrives scrambled.
    """

    def contiguous(leaf: Any) -> Any:
        if isinstance(leaf, ShardedTensorFactory):
            build = leaf.build_fn
            return dataclasses.replace(leaf, build_fn=lambda *args: dict_list_map_outplace(contiguous, build(*args)))
        if isinstance(leaf, ShardedTensor) and leaf.data is not None and not leaf.data.is_contiguous():
            return dataclasses.replace(leaf, data=leaf.data.contiguous())
        return leaf

    return dict_list_map_outplace(contiguous, sharded_state)


@contextmanager
def _reading_data_alone(table: Table) -> Iterator[None]:
    """While the block runs, make torch's readers return `table`, and make `torch.load` load data alone.

    megatron-core creates the readers and planners itself, so that only their classes can be changed.
    """
    load_archive = torch.load

    def return_table(reader: FileSystemReader) -> Table:
        table.storage_meta = StorageMeta(load_id=reader.load_id)  # as torch's own method does
        return table

    def load_data(*arguments: Any, **options: Any) -> Any:
        return load_archive(*arguments, **{**options, "weights_only": True})

    with (
        mock.patch.object(FileSystemReader, "read_metadata", return_table),
        mock.patch.object(torch, "load", load_data),
    ):
        yield
