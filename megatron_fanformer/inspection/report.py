"""Reports on a path: rows for people and one object for programs, made side by side."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from megatron_fanformer.errors import escaped
from megatron_fanformer.terminal import labelled

Advance = Callable[[int], None]
"""Called with each number of bytes that a verification has read."""
Progress = Callable[[int], AbstractContextManager[Advance]]
"""Shows how much of a number of bytes a verification has read."""


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

    def lines(self) -> Iterator[str]:
        """Yield the report as text for a terminal."""
        yield escaped(self.title)
        yield from labelled([(label, escaped(text)) for label, text in self.rows])
        for part in self.parts:
            yield ""
            yield from part.lines()


def as_json(value: Any) -> str:
    """Return one JSON object, indented."""
    return json.dumps(value, indent=2, ensure_ascii=False)
