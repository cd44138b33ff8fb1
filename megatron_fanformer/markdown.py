"""Markdown output: tables, blocks of code, and escaped text."""

from collections.abc import Iterable, Sequence

SPECIAL = "\\`*[]<>|_"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, align: str = "") -> str:
    """Return a table.

    Args:
        rows: cells that are Markdown, of one line each; `as_text` makes them of any text.
        align: a letter for each column, l or r; all are at the left otherwise.
    """
    return "\n".join([heading(columns, align=align), *map(row, rows)])


def heading(columns: Sequence[str], *, align: str = "") -> str:
    """Return a table's first two lines, for rows that follow one by one."""
    rules = ("--:" if letter == "r" else "---" for letter in align or "l" * len(columns))
    return f"{row(columns)}\n|{'|'.join(rules)}|"


def row(cells: Iterable[object]) -> str:
    """Return a line of a table."""
    return "|".join(["", *(f" {cell} " if cell != "" else " " for cell in cells), ""])


def as_text(text: str) -> str:
    """Escape any text so that it stays text in Markdown, and on its line."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return "".join(f"\\{c}" if c in SPECIAL else c for c in plain)
