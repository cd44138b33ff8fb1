"""Saving of a run's checkpoints, while training waits or continues.

    save          captures the state; a process that each rank forks begins to write it into a temporary folder
    finish_due    once the writers of all ranks are done, the main rank publishes the checkpoint (see run_folder.py)

A synchronous `save` calls `finish_due` itself. A state with a value that is not finite is not saved.
"""

import functools
import logging
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException

from megatron_fanformer.checkpoint import megatron_versions, run_folder
from megatron_fanformer.checkpoint.manifest import write_rank_sums
from megatron_fanformer.checkpoint.training_state import training_state
from megatron_fanformer.errors import DivergenceError, FanformerError
from megatron_fanformer.runtime.agreement import gather_values, on_main, reported_by_main
from megatron_fanformer.runtime.parallel import RankGrid

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.02
REMEDY = "free space or memory, and run the same command to continue"


class _Unpublished(NamedTuple):
    """A checkpoint that is being written."""

    step: int
    folder: Path
    config: dict[str, Any]
    attachments: Mapping[str, bytes]


class CheckpointSaver:
    """Saves a run's checkpoints and removes old ones. Every rank makes the same calls in the same order.

    Args:
        keep: the number of the newest checkpoints to keep; None: all.
        async_save: return from `save` when the state is captured, before it is written.
        in_use: returns the names of old checkpoints that must not be removed yet.
    """

    def __init__(
        self,
        run: Path,
        grid: RankGrid,
        *,
        keep: int | None,
        async_save: bool = False,
        in_use: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._checkpoints = run / run_folder.CHECKPOINTS
        self._grid, self._keep, self._async_save, self._in_use = grid, keep, async_save, in_use
        self._strategy = megatron_versions.save_strategy(grid.groups.dp_cp)
        self._calls = AsyncCallsQueue(persistent=False)  # the writer of a persistent queue needs CUDA
        self._unpublished: _Unpublished | None = None
        self._is_validated = False  # whether the shards of all ranks were checked to make whole tensors

    def save(
        self,
        *,
        step: int,
        stages: list[Any],
        optimizer: Any,
        progress: dict[str, Any],
        config: dict[str, Any],
        attachments: Mapping[str, bytes],
    ) -> Path | None:
        """Save the state of a step; return the published checkpoint, or None if `async_save` leaves it unfinished.

        Call `finish_due` for the earlier save first.

        Args:
            stages: the chunks of this rank's pipeline stage.
            progress: plain values that the run resumes from.
            attachments: the content of small files (a tokenizer, a chat template) in the checkpoint, by name.

        Raises:
            DivergenceError: a tensor is not finite.
            FanformerError: the checkpoint could not be written; its files are removed.
        """
        assert self._unpublished is None, "finish_due(blocking=True) comes before the next save"
        state = training_state(stages, optimizer, progress, self._grid)
        check_finite(state, step)
        make_folder = self._reporting(step, None)(run_folder.temporary_folder)  # decorated, to raise FanformerError
        folder = on_main(lambda: make_folder(self._checkpoints, step))
        logger.debug("writing step %d to %s", step, folder)
        self._unpublished = _Unpublished(step, folder, config, attachments)
        with self._reporting(step, folder):  # errors of the main rank, which writes the plain values now
            request = megatron_versions.prepare_save(state, folder, self._strategy, validate=not self._is_validated)
        self._is_validated = True  # later states have the same shards
        if request.async_fn is not None:  # otherwise this rank has nothing to write
            write, rank = request.async_fn, self._grid.rank

            def write_and_sum(*arguments: Any) -> None:
                write(*arguments)
                write_rank_sums(folder, rank)

            request = request._replace(async_fn=functools.partial(megatron_versions.run_writer, write_and_sum))
        self._calls.schedule_async_request(request)
        return None if self._async_save else self.finish_due(blocking=True)

    def finish_due(self, *, blocking: bool) -> Path | None:
        """Publish and return the checkpoint that `save` began; with `blocking`, wait until all ranks have written it.

        Returns None if a rank is still writing, or if nothing is unpublished. Raises FanformerError if a writer failed
        or was killed; the files of the checkpoint are removed.
        """
        due = self._unpublished
        if due is None:
            return None
        try:
            # megatron-core's own waiting is not used: it ends in a collective call, and while one rank is slow, the
            # others would reach the timeout of that call.
            with self._reporting(due.step, due.folder):  # errors of the main rank, which writes the metadata at the end
                while not self._calls.maybe_finalize_async_calls(blocking=False):
                    if not blocking:
                        return None
                    time.sleep(POLL_SECONDS)
        except CheckpointException as error:  # on every rank, but only the main one knows why
            reasons = [
                f"rank {rank}: {str(reason).removeprefix('Worker failure: ')}"
                for rank, (reason, _) in error.failures.items()
            ]
            self._unpublished = None
            failure = on_main(lambda: self._failure(due.step, "; ".join(reasons), due.folder))
            raise reported_by_main(failure) from None
        self._unpublished = None
        logger.debug("step %d is written by every rank", due.step)

        @self._reporting(due.step, due.folder)
        def publish() -> Path:
            return run_folder.publish_checkpoint(self._checkpoints, *due, keep=self._keep, in_use=self._in_use())

        return on_main(publish)

    def close(self) -> None:
        """Kill a writer that is still running after an error, and remove its files."""
        for call in self._calls.async_calls:
            call.async_caller.close(abort=True)
        self._calls.async_calls.clear()
        if self._unpublished is not None and self._grid.is_main:
            shutil.rmtree(self._unpublished.folder, ignore_errors=True)

    @contextmanager
    def _reporting(self, step: int, unfinished: Path | None) -> Iterator[None]:
        """Turn an OSError in the block, or in the decorated function, into the error that `_failure` returns."""
        try:
            yield
        except OSError as error:
            self._unpublished = None
            raise self._failure(step, str(error), unfinished) from error

    def _failure(self, step: int, reason: str, unfinished: Path | None) -> FanformerError:
        """Remove the folder of an unfinished checkpoint (None: there is none yet), and return the error to raise."""
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)  # this may fail, too, for instance on a full disk
        return FanformerError(
            f"the checkpoint of step {step} was not written to {self._checkpoints} ({reason}); {REMEDY}"
        )


# -- the state to save


@torch.no_grad()
def check_finite(sharded_state: dict[str, Any], step: int) -> None:
    """Raise DivergenceError on all ranks if a tensor of a rank's state has a value that is not finite.

    The message names the tensor and the rank. Every rank calls this with its own state.
    """
    names, extremes = [], []
    for part in nested_values(sharded_state):
        if not isinstance(part, ShardedTensor | ShardedTensorFactory) or not isinstance(part.data, Tensor):
            continue
        if part.data.is_floating_point() and part.data.numel():
            names.append(part.key)
            # The largest magnitude, NaN if there is one. (isfinite would make a tensor of the same size.)
            extremes.append(torch.stack(torch.aminmax(part.data)).double().abs().max())
    values = torch.stack([value.to(extremes[0].device) for value in extremes]).tolist() if extremes else []
    bad = [f"{name} has the value {value}" for name, value in zip(names, values, strict=True) if not isfinite(value)]
    by_rank = gather_values(bad[0] if bad else None)
    for rank, problem in enumerate(by_rank):
        if problem is not None:
            where = f" on rank {rank}" if len(by_rank) > 1 else ""
            raise DivergenceError(
                f"step {step} was not saved: {problem}{where}; start again to go on from the last checkpoint, with a "
                "lower optimizer.lr if it happens again"
            )
