"""What a probe came to, before it is written; differences over seeds with their intervals; the folder's README."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_fanformer.experiments.intervals import mean_of
from megatron_fanformer.experiments.result import Cell, Finding, Result, Table

Tell = Callable[[str], None]
"""Is told how far a probe has come."""

MOST_DIGITS = 4


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a probe came to."""

    findings: list[Finding]
    tables: list[Table] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)
    """PNG files by their names."""


def ratio_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """95% of the geometric mean of one ratio for each seed: of their logarithms; None for fewer than two."""
    interval = mean_of([math.log(value) for value in values]).interval
    return None if interval is None else (math.exp(interval[0]), math.exp(interval[1]))


def below(interval: tuple[float, float] | None, none: float) -> bool | None:
    """The rule of every effect that is a decrease: the whole interval is below "no difference"; None without one."""
    return None if interval is None else interval[1] < none


def above(interval: tuple[float, float] | None, none: float) -> bool | None:
    """The same of an increase."""
    return None if interval is None else interval[0] > none


def readme(result: Result, about: str) -> str:
    """The README.md of a probe's folder: what was found, in words and tables."""
    lines = [f"# Experiment {result.experiment}", "", f"{about[0].upper()}{about[1:]}.", "", "## Findings", ""]
    lines += [f"- {finding.sentence}" for finding in result.findings]
    lines += ["", *_table(["finding", "the paper", "here", "95%", "same settings", "shows"], _finding_rows(result))]
    for table in result.tables:
        lines += ["", f"## {table.title}", "", *_table(table.columns, table.rows)]
    for picture in result.pictures:
        lines += ["", f"![{picture.removesuffix('.png')}]({picture})"]
    asked = ", ".join(f"{name} {_shown(value)}" for name, value in result.settings.items())
    machine = ", ".join(f"{name} {value}" for name, value in result.machine.items() if isinstance(value, str | int))
    lines += ["", "## Settings", "", f"{asked}.", "", f"{result.seconds:,.0f} s on: {machine}.", ""]
    return "\n".join(lines)


def _finding_rows(result: Result) -> list[list[Cell]]:
    words = {True: "yes", False: "no", None: "cannot be told"}
    return [
        [
            found.name,
            found.paper,
            None if found.ours is None else f"{_shown(found.ours)} {found.unit}",
            None if found.interval is None else " to ".join(map(_shown, found.interval)),
            found.same_settings,
            words[found.shows],
        ]
        for found in result.findings
    ]


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> list[str]:
    lines = [[*columns], ["---"] * len(columns), *([_shown(cell) for cell in row] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.{MOST_DIGITS}g}" if abs(value) < 10**MOST_DIGITS else f"{value:,.0f}"
    return str(value).replace("|", "\\|")
