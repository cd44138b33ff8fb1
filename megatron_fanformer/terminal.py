"""Formats tables and numbers, and prints lines and progress to a terminal or a pipe.

A row or a sentence is one line, however long: the terminal wraps it, and `grep`, `cut` and logs get it whole.
Nothing here has a color; rich's progress bars, for terminals alone, heed NO_COLOR themselves.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

UNITS = ("bytes", "kB", "MB", "GB", "TB")
SHOWN_NAMES = 4  # of a long list, besides the last name

Row: TypeAlias = Sequence[str]
Report: TypeAlias = Callable[..., None]
"""Takes the name of the phase that is running, and optionally its progress, which only a terminal shows."""


def show(lines: Iterable[str]) -> None:
    """Print lines to standard output as they come."""
    for line in lines:
        print(line, flush=True)


def print_stderr(line: str) -> None:
    """Print a line to standard error."""
    print(line, file=sys.stderr, flush=True)


def size(count: int) -> str:
    """Return a number of bytes in three significant digits and a decimal unit, such as 1.23 GB."""
    unit, value = 0, float(count)
    while value >= 999.5 and unit < len(UNITS) - 1:  # three digits of 999.5 are 1e+03
        unit, value = unit + 1, value / 1000
    return f"{value:.3g} {UNITS[unit]}" if unit else f"{count} {UNITS[0]}"


def plural(count: int, noun: str) -> str:
    """Return `1 file`, `2,000 files`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def some(names: Iterable[str]) -> str:
    """Return names on one line; of a long list the first four and the last."""
    listed = list(names)
    if len(listed) <= SHOWN_NAMES + 1:
        return ", ".join(listed)
    return f"{', '.join(listed[:SHOWN_NAMES])} … {listed[-1]}"


def table(columns: Row, rows: Iterable[Row], *, align: str) -> list[str]:
    """Return the lines of a table.

    Args:
        align: a letter for each column: l for text, r for numbers.
    """
    cells = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    formats = [(width, "<" if letter == "l" else ">") for width, letter in zip(widths, align, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, (width, side) in zip(row, formats, strict=True)).rstrip()
        for row in cells
    ]


@contextmanager
def phases(first: str) -> Iterator[Report]:
    """Show progress: a status line on a terminal, otherwise a line with the duration of each finished phase.

    Args:
        first: the status line until the first report.
    """
    from rich.console import Console

    console = Console(stderr=True, markup=False)
    if console.is_terminal:
        with console.status(first) as line:
            yield lambda phase, progress="": line.update(f"{phase}, {progress}" if progress else phase)
        return
    current, started = "", 0.0

    def report(phase: str, _progress: str = "") -> None:
        nonlocal current, started
        if phase != current:
            if current:
                print_stderr(f"{current}: {time.monotonic() - started:.1f} s")
            current, started = phase, time.monotonic()

    yield report
    report("")  # prints the last phase
