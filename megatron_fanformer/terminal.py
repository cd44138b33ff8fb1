"""Output to a terminal or a pipe: tables, labels, progress, and the end of output that nobody reads.

A row or a sentence is one line, however long: the terminal wraps it, and `grep`, `cut` and logs get it whole.
Nothing here has a color; rich's progress bars, for terminals alone, heed NO_COLOR themselves.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

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
