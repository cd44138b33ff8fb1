"""The process that writes a rank's part of a checkpoint while training goes on: its results, and its end.

It is forked, and so sees the rank's memory as it was then: on a CPU the fork is the copy that the optimizer, which
updates in place, cannot reach. (From a GPU megatron-core copies to host memory first.)
"""

import functools
import logging
import os
import pickle
import queue
import signal
import tempfile
from collections.abc import Callable
from multiprocessing import process
from typing import Any

from megatron_fanformer.processes import end_with_parent

LOGGER = "megatron.core.dist_checkpointing.strategies.filesystem_async"


class ResultsFile:
    """Keeps a writer's results for the rank to read after its end; has the two methods of a queue that are used.

    It is an unnamed file, which a fork inherits. megatron-core's own is a queue in a server process, which takes
    seconds to start, imports `__main__` again, and is killed by a signal sent to a run's whole process group:
    the last checkpoint, which that signal requested, would be lost.

    Its pickle is not part of a checkpoint: this process's own fork writes it, and nobody else can.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process

    def put(self, results: Any) -> None:
        """Keep results until they are read."""
        pickle.dump(results, self._file)
        self._file.flush()

    def get_nowait(self) -> Any:
        """Return the results that were put; an exception if there are none, which megatron-core treats as a failure."""
        self._file.seek(0)
        try:
            return pickle.load(self._file)
        except (EOFError, pickle.UnpicklingError):
            return RuntimeError("its writer was killed")
        finally:
            self._file.seek(0)
            self._file.truncate()


def watched(write: Callable[[int, Any, Any], None]) -> Callable[[int, Any, Any], None]:
    """megatron-core's writer, to be called in a process of its own: it always ends, and says why it failed.

    By itself it waits forever if a process that it starts (in 0.16) is killed, reports what went wrong to a log, not to
    the rank (in 0.19), and outlives a rank that is killed, whose port it keeps.
    """

    @functools.wraps(write)
    def write_watched(rank: int, buckets: Any, results: Any) -> None:
        signal.signal(signal.SIGCHLD, _end_if_one_was_killed)
        end_with_parent()
        os.register_at_fork(after_in_child=end_with_parent)
        log = _Log()
        local: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            write(rank, buckets, local)
            outcome = local.get()
        except Exception as error:
            outcome = error
        results.put(RuntimeError(log.errors[0]) if isinstance(outcome, Exception) and log.errors else outcome)

    return write_watched


class _Log(logging.Handler):
    """The errors that megatron-core's writer logs in this process, which are then logged nowhere else."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []
        logger = logging.getLogger(LOGGER)
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        self.errors.append(record.getMessage())


def _end_if_one_was_killed(*_: Any) -> None:
    children = list(vars(process)["_children"])  # active_children() omits those that ended
    if any(child.exitcode for child in children):
        for child in children:
            child.kill()
        os._exit(1)
