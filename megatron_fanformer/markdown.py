"""Markdown output: tables, and escaped text."""

from collections.abc import Iterable, Sequence

SPECIAL = "\\`*[]<>|_"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, align: str = "") -> str:
    """Return a table.

    Args:
        rows: cells of Markdown, each on one line; `as_text` makes such a cell of any text.
        align: a letter for each column, l or r; by default every column is aligned left.
    """
    rules = ["--:" if letter == "r" else "---" for letter in align or "l" * len(columns)]
    header, *others = ([f" {cell} " if cell != "" else " " for cell in row] for row in [columns, *rows])
    return "\n".join(f"|{'|'.join(cells)}|" for cells in [header, rules, *others])


def as_text(text: str) -> str:
    """Escape a text for Markdown, and put it on one line."""
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return "".join(f"\\{c}" if c in SPECIAL else c for c in plain)
