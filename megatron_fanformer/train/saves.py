"""The saves of a run: writing checkpoints, giving complete ones their names, and copying these to the mirror."""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.profiler import record_function

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.remote import FINISH_SECONDS, Mirror
from megatron_fanformer.runtime.agreement import on_main
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.train.config import RunConfig
from megatron_fanformer.train.interrupts import InterruptListener

if TYPE_CHECKING:
    from megatron_fanformer.checkpoint.saving import CheckpointSaver

STOPPED_MIRROR_SECONDS = 60.0  # time to finish copies after a signal to stop; the next start of the run copies the rest

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves a run's checkpoints one at a time, and copies them to the mirror if the run has one.

    Every rank creates one, and makes the same calls in the same order.

    Args:
        listener: receives the requests to save and to stop.
        note_saved: is called when a checkpoint is published.
    """

    def __init__(
        self, config: RunConfig, grid: RankGrid, listener: InterruptListener, *, note_saved: Callable[[], None]
    ) -> None:
        self._config, self._grid, self._run = config, grid, Path(config.training.run_dir)
        self._listener, self._note_saved = listener, note_saved
        self._mirror = Mirror(config.checkpoint.mirror if grid.is_main else None, keep=config.checkpoint.mirror_keep)

    @functools.cached_property
    def _saver(self) -> "CheckpointSaver":
        """The writer of checkpoints; created after the first step, because importing its module takes some 0.4 s."""
        from megatron_fanformer.checkpoint.saving import CheckpointSaver

        return CheckpointSaver(
            self._run,
            self._grid,
            keep=self._config.checkpoint.keep,
            async_save=self._config.checkpoint.async_save,
            in_use=lambda: self._mirror.in_use,
        )

    def save(self, step: int, **state: Any) -> None:
        """Publish the checkpoint in progress, then save the state of a step (see `CheckpointSaver.save`)."""
        self.publish_if_written(step, blocking=True)
        self._listener.clear_save_requests()
        with record_function("phase saving"):
            published = self._saver.save(step=step, **state)
        self._note_published(step, published)

    def publish_if_written(self, step: int, *, blocking: bool) -> None:
        """Publish the checkpoint in progress if it is completely written; `blocking`: wait until it is."""
        self._note_published(step, self._saver.finish_due(blocking=blocking))

    def copy_to_mirror(self, step: int) -> None:
        """Start copying the published checkpoint of a step to the mirror."""
        self._mirror.offer(self._run / run_folder.CHECKPOINTS / run_folder.checkpoint_name(step))

    def finish_copies(self, *, was_stopped: bool) -> None:
        """Wait for the copies to the mirror: until a signal to stop comes, or for a minute if one has come before."""
        if self._config.checkpoint.mirror is None:
            return

        def finish() -> None:
            is_stopping = was_stopped or self._listener.pending().stop  # a signal may have come during the last save
            seconds = STOPPED_MIRROR_SECONDS if is_stopping else FINISH_SECONDS
            self._mirror.finish(lambda: not is_stopping and self._listener.pending().stop, seconds)

        on_main(finish)

    def close(self) -> None:
        """Abort the checkpoint in progress, if any."""
        if "_saver" in vars(self):  # otherwise the cached property is not created yet
            self._saver.close()

    def _note_published(self, step: int, published: Path | None) -> None:
        if published is not None:
            self._note_saved()
            logger.info("step %d  saved %s", step, published)  # the checkpoint may be of an earlier step
            self._mirror.offer(published)
