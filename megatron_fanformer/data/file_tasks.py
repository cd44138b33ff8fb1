"""Work on many files, several at once, with a line now and then that says how far it is."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

Advance = Callable[[int], None]
"""Called with the bytes of each part of a file that is done."""

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 15.0


class FileTasks:
    """Tasks that go through files, each in a thread.

    Args:
        total_bytes: of all files.
        message: what is logged, with places for percent, total gigabytes and time left.
        threads: files at a time.
    """

    def __init__(self, total_bytes: int, message: str, *, threads: int) -> None:
        self._total, self._message, self._threads = total_bytes, message, threads
        self._done = 0
        self._started = self._logged_at = time.monotonic()
        self._lock, self._is_over = threading.Lock(), False

    def run(self, tasks: Sequence[Callable[..., object]]) -> None:
        """Run all of them, each given an `advance`; raises what the first of the list raises that fails."""
        with ThreadPoolExecutor(self._threads) as threads:
            waiting = [threads.submit(task, advance=self._advance) for task in tasks]
            try:
                for done in waiting:
                    done.result()
            finally:
                self._is_over = True  # those that still work end with the next part
                for left in waiting:
                    left.cancel()

    def stop(self) -> None:
        """Let `run` end with the parts that are being worked on; it raises InterruptedError."""
        self._is_over = True

    def _advance(self, part_bytes: int) -> None:
        if self._is_over:
            raise InterruptedError("another file has failed, or nobody waits for it")
        with self._lock:
            self._done += part_bytes
            now = time.monotonic()
            if now - self._logged_at < SECONDS_BETWEEN_LINES:
                return
            self._logged_at = now
            left = timedelta(seconds=int((now - self._started) * max(0, self._total - self._done) / self._done))
            logger.info(self._message, 100 * self._done / self._total, self._total / 1e9, left)
