"""Output to a terminal or a pipe: tables, labels, progress, and the end of output that nobody reads.

A row or a sentence is one line, however long: the terminal wraps it, and `grep`, `cut` and logs get it whole.
Nothing here has a color; rich's progress bars, for terminals alone, heed NO_COLOR themselves.

Output fails after `| head`, at the end of an ssh, on a full disk. A command whose result is in files, such as `train`,
then goes on, and its log file says once that printing has stopped. One whose result is its output ends: by SIGPIPE
where nobody reads, as other programs do, else by an error.
"""

import io
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

logger = logging.getLogger(__name__)

FILE_ONLY = {"file_only": True}
"""A log record's `extra` that keeps it off the terminal."""

GAP = "  "
UNITS = ("bytes", "kB", "MB", "GB", "TB")
SHOWN_NAMES = 4  # of a long list: the first ones, and the last

Row: TypeAlias = Sequence[str]
Report: TypeAlias = Callable[..., None]
"""Called with the name of a phase that begins and, for a terminal, its progress."""


def show(lines: Iterable[str]) -> None:
    """Print lines as they come."""
    for line in lines:
        print(line)
    print(end="", flush=True)


def print_stderr(line: str) -> None:
    """Print an error or a notice."""
    print(line, file=sys.stderr, flush=True)


def print_loading(name: str) -> None:
    """Report that torch is being imported, for seconds; nothing where it is imported already."""
    if "torch" not in sys.modules:
        print_stderr(f"megatron-fanformer: loading {name}")


def size(count: int) -> str:
    """Return a number of bytes in three or four digits, by powers of a thousand."""
    unit, value = 0, float(count)
    while value >= 999.5 and unit < len(UNITS) - 1:
        unit, value = unit + 1, value / 1000
    return f"{value:.3g} {UNITS[unit]}" if unit else f"{count} {UNITS[0]}"


def plural(count: int, noun: str) -> str:
    """Return `1 file`, `2,000 files`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def some(names: Iterable[str]) -> str:
    """Return a list of names on one line; of a long one the first and the last."""
    listed = list(names)
    if len(listed) <= SHOWN_NAMES + 1:
        return ", ".join(listed)
    return f"{', '.join(listed[:SHOWN_NAMES])} … {listed[-1]}"


def table(columns: Row, rows: Iterable[Row], *, align: str) -> list[str]:
    """Return a table, a line for each row.

    Args:
        align: a letter for each column: l of text, r of numbers.
    """
    cells = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    places = [(width, "<" if letter == "l" else ">") for width, letter in zip(widths, align, strict=True)]
    return [
        GAP.join(f"{cell:{side}{width}}" for cell, (width, side) in zip(row, places, strict=True)).rstrip()
        for row in cells
    ]


def labelled(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Return a line for each label and its text."""
    return [GAP + line for line in table(("", ""), rows, align="ll")[1:]]


@contextmanager
def phases(first: str) -> Iterator[Report]:
    """Show progress: a status line on a terminal, otherwise one line per finished phase with its duration.

    Args:
        first: the status line until the first report.
    """
    from rich.console import Console

    console = Console(stderr=True, markup=False)
    if console.is_terminal:
        with console.status(first) as line:
            yield lambda phase, how_far="": line.update(f"{phase}, {how_far}" if how_far else phase)
        return
    phase, began = "", 0.0

    def print_next(name: str, _how_far: str = "") -> None:
        nonlocal phase, began
        if name == phase:
            return
        if phase:
            print(f"{phase}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        phase, began = name, time.monotonic()

    yield print_next
    print_next("")


# -- output that fails

_goes_on = False


def guard_output() -> None:
    """Guard this process's output from here on; call it once."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:  # a closed descriptor
            content = io.BufferedWriter(_Guarded(stream.fileno(), "wb", closefd=False))
            how = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            setattr(sys, name, io.TextIOWrapper(content, stream.encoding, stream.errors, **how))


def go_on_unread() -> None:
    """Make this process go on where its output fails."""
    global _goes_on
    _goes_on = True


class _Guarded(io.FileIO):
    """Bytes to a descriptor; nowhere once it has failed."""

    has_failed = False

    def write(self, content: Any, /) -> int:
        try:
            if not self.has_failed:
                return int(super().write(content))
        except OSError as error:
            self.has_failed = True  # also for what is still in buffers at the end
            name = {1: "standard output", 2: "standard error"}[self.fileno()]
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
