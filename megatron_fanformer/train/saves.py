"""The saves of a run: a step's state to disk, and all that is due once a checkpoint has its name."""

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

STOPPED_MIRROR_SECONDS = 60.0  # after a signal to stop, whose sender may not wait: the next start copies the rest

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves a run's checkpoints one at a time, and copies them to the mirror if the run has one.

    Every rank makes one, and makes the same calls in the same order.

    Args:
        listener: of the interrupts that ask for saves.
        note_saved: is called when a checkpoint is published.
    """

    def __init__(
        self,
        config: RunConfig,
        grid: RankGrid,
        listener: InterruptListener,
        *,
        note_saved: Callable[[], None],
    ) -> None:
        self._config, self._grid = config, grid
        self._checkpoints = Path(config.training.run_dir) / run_folder.CHECKPOINTS
        self._listener, self._note_saved = listener, note_saved
        self._has_mirror = config.checkpoint.mirror is not None
        self._mirror = Mirror(config.checkpoint.mirror if grid.is_main else None, keep=config.checkpoint.mirror_keep)

    @functools.cached_property
    def _saver(self) -> "CheckpointSaver":
        """Made after the first step: torch's checkpoints import its distributed tensors, which takes some 0.4 s."""
        from megatron_fanformer.checkpoint.saving import CheckpointSaver

        return CheckpointSaver(
            Path(self._config.training.run_dir),
            self._grid,
            keep=self._config.checkpoint.keep,
            async_save=self._config.checkpoint.async_save,
            in_use=lambda: self._mirror.in_use,
        )

    def save(self, step: int, **state: Any) -> None:
        """Save the state of a step, after an earlier one is published: see `CheckpointSaver.save`."""
        self.publish_if_written(step, blocking=True)
        self._listener.grant_save()
        with record_function("phase saving"):
            published = self._saver.save(step=step, **state)
        self._log_saved(step, published)

    def publish_if_written(self, step: int, *, blocking: bool) -> None:
        """Give a checkpoint that was being written its name, once it is; `blocking` waits for that."""
        self._log_saved(step, self._saver.finish_due(blocking=blocking))

    def copy(self, step: int) -> None:
        """Copy the checkpoint of a step, which is there, to the mirror."""
        self._mirror.offer(self._checkpoints / run_folder.checkpoint_name(step))

    def finish_copies(self, *, was_stopped: bool) -> None:
        """Wait until all is copied; after a signal for a minute at most, else until one comes."""
        if not self._has_mirror:
            return

        def finish() -> None:  # a signal may have come in the last step, or during its save, too
            is_stopping = was_stopped or self._listener.now().stop
            seconds = STOPPED_MIRROR_SECONDS if is_stopping else FINISH_SECONDS
            self._mirror.finish(lambda: not is_stopping and self._listener.now().stop, seconds)

        on_main(finish)

    def close(self) -> None:
        """Abort the writing of a checkpoint."""
        if "_saver" in vars(self):
            self._saver.close()

    def _log_saved(self, step: int, published: Path | None) -> None:
        if published is not None:
            self._note_saved()
            logger.info("step %d  saved %s", step, published)  # possibly of an earlier step
            self._mirror.offer(published)
