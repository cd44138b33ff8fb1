"""Copies a run's checkpoints to another store while it trains, in a thread of the main rank.

One is copied at a time. Of those published meanwhile the newest is next, and the others are left out. A checkpoint
that is being copied is not removed (`in_use`).
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megatron_fanformer.checkpoint.remote import RemoteRun
from megatron_fanformer.errors import FanformerError, redacted
from megatron_fanformer.stores import with_attempts

FINISH_SECONDS = 600.0
"""Time without a finished file after which the end of a run waits no longer."""
POLL_SECONDS = 0.05

logger = logging.getLogger(__name__)


class Mirror:
    """The main rank's copies. Its methods are called by the main thread, and only `finish` waits.

    Args:
        url: of the run's folder there; None: nothing is copied.
        keep: how many checkpoints to keep there; None for all.
        note_failure: is called with a checkpoint's name and the reason, whenever an attempt to copy it failed.
    """

    def __init__(self, url: str | None, *, keep: int | None, note_failure: Callable[[str, str], None]) -> None:
        self._url, self._keep, self._note_failure = url, keep, note_failure
        self._shown = redacted(url or "")
        self._failures: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self._copying: Path | None = None
        self._waiting: Path | None = None
        self._offered = self._copied = ""
        self._moved = 0.0  # when the last file was copied

    @property
    def in_use(self) -> tuple[str, ...]:
        """The name of the checkpoint that is being copied, and must stay until then."""
        copying = self._copying
        return () if copying is None else (copying.name,)

    def offer(self, checkpoint: Path) -> None:
        """Copy a checkpoint, once the one that is being copied is done."""
        if self._url is not None:
            self._waiting, self._offered = checkpoint, checkpoint.name
            self.poll()

    def poll(self) -> None:
        """Report failures since the last call, and begin the next copy."""
        while not self._failures.empty():
            self._note_failure(*self._failures.get())
        if self._copying is None and self._waiting is not None:
            self._copying, self._waiting = self._waiting, None
            # a daemon, which the end of the process cuts off: without a manifest it has copied nothing
            threading.Thread(target=self._copy, args=(self._url, self._copying), name="mirror", daemon=True).start()

    def finish(self, is_enough: Callable[[], bool], seconds: float = float("inf")) -> None:
        """Wait until all is copied or nothing moves any more; log a checkpoint that is not copied.

        Args:
            is_enough: whether to wait no longer.
            seconds: to wait at most.
        """
        self._moved = time.monotonic()
        end = self._moved + seconds
        while (self._copying or self._waiting) and not is_enough():
            if time.monotonic() > min(end, self._moved + FINISH_SECONDS):
                break
            time.sleep(POLL_SECONDS)
            self.poll()
        self.poll()
        if self._offered != self._copied:
            logger.warning(
                "%s is not copied to %s; it is safe here, and the same command copies it when it is started again",
                self._offered,
                self._shown,
            )

    def _copy(self, url: str, checkpoint: Path) -> None:
        """Copy one checkpoint, in the thread."""

        def advance() -> None:
            self._moved = time.monotonic()

        def failed(attempt: int, reason: str) -> None:
            logger.warning("%s is not copied to %s (attempt %d): %s", checkpoint.name, self._shown, attempt, reason)
            self._failures.put((checkpoint.name, reason))

        started = time.monotonic()
        try:
            with_attempts(lambda: RemoteRun(url).copy(checkpoint, keep=self._keep, advance=advance), failed)
        except FanformerError as error:  # not tried again
            failed(1, str(error))
        except Exception:
            logger.warning("%s is given up until the next one is published", checkpoint.name)
        else:
            self._copied = checkpoint.name
            logger.info("copied %s to %s in %.1f s", checkpoint.name, self._shown, time.monotonic() - started)
        self._copying = None
