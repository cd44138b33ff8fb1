"""Text for a terminal: tables, labels, lines and what is under way, laid out for its width.

In a terminal a line ends at its width, between words; a word alone, such as a path or a tensor's name, is never broken.
In a pipe or a file every row and every sentence is one line, however long, as kubectl and gh have it: `grep`, `cut` and
logs get them whole. Nothing here has a colour, so that there is none for NO_COLOR to take away; the bars and signs of
life that rich draws heed it themselves, and are for terminals alone.
"""

import itertools
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO, TypeAlias

GAP = "  "
NARROWEST = 24  # columns of text that wraps: below it, what stands beside it moves elsewhere
UNITS = ("bytes", "kB", "MB", "GB", "TB")
SHOWN_NAMES = 4  # of a long list: the first ones, and the last

Row: TypeAlias = Sequence[str]
Report: TypeAlias = Callable[..., None]
"""Called with what begins now and, for a terminal, its progress."""


def width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal that the stream (standard output) goes to; None for a pipe or a file."""
    return shutil.get_terminal_size().columns if (stream or sys.stdout).isatty() else None


def show(lines: Iterable[str], *, as_they_are: bool = False) -> None:
    """Print lines as they come, each as `fitted` to the terminal.

    Args:
        as_they_are: for what is not a sentence, such as JSON: nothing is fitted.
    """
    columns = None if as_they_are else width()
    for line in lines:
        print(*fitted(line, columns), sep="\n")
    sys.stdout.flush()


def print_stderr(line: str) -> None:
    """Print an error or a notice, where these go."""
    print(*fitted(line, width(sys.stderr)), sep="\n", file=sys.stderr, flush=True)


def print_loading(what: str) -> None:
    """Report what this process's next seconds are for; nothing where torch is imported already."""
    if "torch" not in sys.modules:
        print_stderr(f"megatron-fanformer: loading {what}")


def fitted(line: str, columns: int | None) -> list[str]:
    """Return a line as lines of at most that many columns, as far as its words allow; all but the first are indented
    more.
    """
    if columns is None or len(line) <= columns:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return wrapped(line.strip(), columns, indent, indent + GAP)


def wrapped(text: str, columns: int, first: str = "", rest: str = "") -> list[str]:
    """Return a text as lines of at most that many columns, cut between words; `first` and `rest` stand in front of
    them.
    """
    lines = textwrap.wrap(
        text, columns, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    return lines or [""]


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


# -- tables


def table(columns: Row, rows: Iterable[Row], *, align: str, width: int | None) -> list[str]:
    """Return a table, in the first form that the width has room for.

    Columns beside each other, in which text wraps; or the first column of text on lines of its own, numbers in columns
    below it, and other text below these; or a line for each cell.

    Args:
        align: a letter for each column: l of text, r of numbers.
        width: columns of the terminal; None: any.
    """
    cells = [columns, *rows]
    return _beside(cells, align, width) or _stacked(cells, align, width or 0) or _listed(cells, width)


def _beside(cells: list[Row], align: str, width: int | None) -> list[str]:
    """Empty where that is too wide."""
    rooms: list[int] = []
    least: list[int] = []
    for column, letter in zip(zip(*cells, strict=True), align, strict=True):
        natural = max(map(len, column))
        longest_word = max((len(word) for cell in column for word in cell.split()), default=0)
        rooms.append(natural)
        least.append(min(natural, max(NARROWEST, longest_word)) if letter == "l" else natural)
    while width is not None and sum(rooms) + len(GAP) * (len(rooms) - 1) > width:
        loose = [number for number, room in enumerate(rooms) if room > least[number]]
        if not loose:
            return []
        rooms[max(loose, key=rooms.__getitem__)] -= 1
    return [line for row in cells for line in _row(row, rooms, align)]


def _row(row: Row, rooms: list[int], align: str) -> Iterator[str]:
    cells = [wrapped(cell, room) if len(cell) > room else [cell] for cell, room in zip(row, rooms, strict=True)]
    for parts in itertools.zip_longest(*cells, fillvalue=""):
        placed = (
            part.ljust(room) if letter == "l" else part.rjust(room)
            for part, room, letter in zip(parts, rooms, align, strict=True)
        )
        yield GAP.join(placed).rstrip()


def _stacked(cells: list[Row], align: str, width: int) -> list[str]:
    """Empty where the numbers beside each other are too wide, or there are none."""
    numbers = [number for number, letter in enumerate(align) if letter == "r"]
    name, *texts = [number for number, letter in enumerate(align) if letter == "l"]
    rooms = [max(len(row[number]) for row in cells) for number in numbers]
    if not numbers or sum(rooms) + len(GAP) * len(rooms) > width:
        return []
    lines: list[str] = []
    for row in cells:
        lines += fitted(row[name], width) if row[name] else []
        if any(row[number] for number in numbers):
            lines.append("".join(GAP + row[number].rjust(room) for number, room in zip(numbers, rooms, strict=True)))
        if row is not cells[0]:
            lines += _labelled_cells(cells[0], row, texts, width)
    return lines


def _listed(cells: list[Row], width: int | None) -> list[str]:
    columns, *rows = cells
    lines: list[str] = []
    for row in rows:
        lines += _labelled_cells(columns, row, [0], width, indent="")
        lines += _labelled_cells(columns, row, range(1, len(row)), width)
    return lines


def _labelled_cells(
    columns: Row, row: Row, numbers: Iterable[int], width: int | None, *, indent: str = GAP
) -> list[str]:
    """Return lines for the cells that are not empty, each behind its column's name."""
    texts = [
        f"{columns[number]}: {row[number]}" if columns[number] else row[number] for number in numbers if row[number]
    ]
    return [line for text in texts for line in fitted(indent + text, width)]


def labelled(rows: Iterable[tuple[str, str]], width: int | None) -> Iterator[str]:
    """Labels with their texts beside them, in which texts wrap; below them where a word needs the width."""
    listed = list(rows)
    room = max((len(label) for label, _ in listed), default=0)
    for label, text in listed:
        beside = f"{GAP}{label:<{room}}{GAP}"
        words = max(map(len, text.split()), default=0)
        if width is None:
            yield f"{beside}{text}".rstrip()
        elif len(beside) + max(words, min(len(text), NARROWEST)) <= width:
            yield from wrapped(text, width, beside, " " * len(beside)) if text else [beside.rstrip()]
        else:
            yield from [f"{GAP}{label}"] if label else []
            yield from fitted(2 * GAP + text, width)


# -- what is under way


@contextmanager
def phases(first: str) -> Iterator[Report]:
    """Shows what is under way: in a terminal on its last line, elsewhere by a line with its seconds once it has ended.

    Args:
        first: what a terminal shows until the first report.
    """
    from rich.console import Console

    console = Console(stderr=True, markup=False)
    if console.is_terminal:
        with console.status(first) as line:
            yield lambda phase, how_far="": line.update(f"{phase}, {how_far}" if how_far else phase)
        return
    phase, began = "", 0.0

    def print_next(what: str, _how_far: str = "") -> None:
        nonlocal phase, began
        if what == phase:
            return
        if phase:
            print(f"{phase}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        phase, began = what, time.monotonic()

    yield print_next
    print_next("")
