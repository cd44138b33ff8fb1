"""Standard output and standard error, when whoever reads them has gone: `| head`, an ssh that ended, a full disk.

A command whose result is in files, such as `train`, goes on, and what it prints from then on is dropped, which its log
file says once. One whose result is what it prints ends: quietly by SIGPIPE where nobody reads, as other programs do; by
an error where the text could not be kept.
"""

import io
import logging
import os
import select
import signal
import sys
from typing import Any

logger = logging.getLogger(__name__)

FILE_ONLY = {"file_only": True}
"""A log record's `extra` that keeps it off the terminal."""
NAMES = {1: "standard output", 2: "standard error"}

_goes_on = False


def guard_output() -> None:
    """Take care of this process's output from here on, and of its input; to be called once, before anything opens a
    file.

    One that was closed (`>&-`) is opened on nothing: else the next file to be opened would take its number, and get
    what is printed.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    if sys.stdin is None:  # as Python has it where it was closed
        sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = guarded(sys.stdout, 1), guarded(sys.stderr, 2)


def go_on_unread() -> None:
    """Make this process go on where its output fails."""
    global _goes_on
    _goes_on = True


def guarded(stream: Any, descriptor: int) -> io.TextIOWrapper:
    """Return a guarded text stream to a descriptor, otherwise like the one that Python opened, or would have."""
    buffered = io.BufferedWriter(_Guarded(descriptor, "wb", closefd=False))
    write_through = getattr(stream, "write_through", False)  # by `python -u`, whose streams have no buffer to flush
    return io.TextIOWrapper(
        buffered,
        encoding=getattr(stream, "encoding", None) or "utf-8",
        errors=getattr(stream, "errors", None) or "backslashreplace",
        line_buffering=write_through or getattr(stream, "line_buffering", descriptor == 2),
        write_through=write_through,
    )


class _Guarded(io.FileIO):
    """Bytes to one of the two; once it has failed, to nowhere."""

    has_failed = False

    def write(self, content: Any, /) -> int:
        while not self.has_failed:
            try:
                if (written := super().write(content)) is not None:
                    return written
                select.select([], [self], [])  # full, and set not to block: wait, as one that does would
            except OSError as error:
                self.has_failed = True  # also for what is still in buffers at the end
                self._end_or_go_on(error)
        return memoryview(content).nbytes

    def _end_or_go_on(self, error: OSError) -> None:
        name = NAMES.get(self.fileno(), "output")
        if _goes_on:
            reason = error.strerror
            logger.warning("%s cannot be written (%s); what is printed is dropped", name, reason, extra=FILE_ONLY)
            return
        if isinstance(error, BrokenPipeError):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPIPE,))
            os.kill(os.getpid(), signal.SIGPIPE)
        raise OSError(error.errno, error.strerror, name) from None
