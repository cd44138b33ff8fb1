"""Reports on a path: rows for people and one object for programs, made side by side."""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megatron_fanformer.errors import escaped
from megatron_fanformer.terminal import labelled

UNITS = ("bytes", "kB", "MB", "GB", "TB")
SHOWN_NAMES = 4  # of a long list: the first ones, and the last

Advance = Callable[[int], None]
"""Called with each number of bytes that a verification has read."""


@dataclass(frozen=True)
class Report:
    """A description of a target and of its parts."""

    title: str
    facts: dict[str, Any]
    """Facts as `--json` prints them."""
    rows: list[tuple[str, str]] = field(default_factory=list)
    """Labels and their texts, in reading order."""
    parts: "list[Report]" = field(default_factory=list)

    def as_object(self) -> dict[str, Any]:
        """Return the facts, those of the parts included."""
        return {**self.facts, "parts": [part.as_object() for part in self.parts]} if self.parts else self.facts

    def lines(self, width: int | None) -> Iterator[str]:
        """Yield the report as text for a terminal of that width; None: any."""
        yield escaped(self.title)
        yield from labelled([(label, escaped(text)) for label, text in self.rows], width)
        for part in self.parts:
            yield ""
            yield from part.lines(width)


def as_json(value: Any) -> str:
    """Return one JSON object, indented."""
    return json.dumps(value, indent=2, ensure_ascii=False)


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
