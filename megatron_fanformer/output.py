"""Standard output and standard error after whoever reads them has gone: `| head`, an ssh that ended, a full disk.

A command whose result is in files, such as `train`, goes on, and its log file says once that printing has stopped. One
whose result is its output ends: by SIGPIPE where nobody reads, as other programs do, else by an error.
"""

import io
import logging
import os
import signal
import sys
from typing import Any

logger = logging.getLogger(__name__)

FILE_ONLY = {"file_only": True}
"""A log record's `extra` that keeps it off the terminal."""
NAMES = {1: "standard output", 2: "standard error"}

_goes_on = False


def guard_output() -> None:
    """Guard this process's output from here on; call it once."""
    sys.stdout, sys.stderr = _guarded(sys.stdout), _guarded(sys.stderr)


def go_on_unread() -> None:
    """Make this process go on where its output fails."""
    global _goes_on
    _goes_on = True


def _guarded(stream: Any) -> Any:
    """Return a guarded text stream, otherwise like the given one; None, for a closed descriptor, stays."""
    if stream is None:
        return None
    return io.TextIOWrapper(
        io.BufferedWriter(_Guarded(stream.fileno(), "wb", closefd=False)),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Guarded(io.FileIO):
    """Bytes to a descriptor; nowhere once it has failed."""

    has_failed = False

    def write(self, content: Any, /) -> int:
        try:
            if not self.has_failed:
                return int(super().write(content))
        except OSError as error:
            self.has_failed = True  # also for what is still in buffers at the end
            name = NAMES[self.fileno()]
            if not _goes_on and isinstance(error, BrokenPipeError):
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPIPE,))
                os.kill(os.getpid(), signal.SIGPIPE)
            if not _goes_on:
                raise OSError(error.errno, error.strerror, name) from None
            logger.warning(
                "%s cannot be written (%s); further output is dropped", name, error.strerror, extra=FILE_ONLY
            )
        return memoryview(content).nbytes
