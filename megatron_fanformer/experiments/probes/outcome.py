"""The results of a probe, before they are written; differences over seeds with their intervals."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_fanformer.experiments.intervals import mean_of
from megatron_fanformer.experiments.result import Finding, Table

Log = Callable[[str], None]
"""Called with a line on a probe's progress."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The results of a probe."""

    findings: list[Finding]
    tables: list[Table] = field(default_factory=list)
    pictures: dict[str, bytes] = field(default_factory=dict)
    """PNG files by their names."""
    seconds: float | None = None
    """Computing time, if earlier calls did a part; None: this call's time is all."""


def ratio_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95% interval of the geometric mean of one ratio per seed, from logarithms; None for fewer than two."""
    interval = mean_of([math.log(value) for value in values]).interval
    return None if interval is None else (math.exp(interval[0]), math.exp(interval[1]))


def below(interval: tuple[float, float] | None, none: float) -> bool | None:
    """Return the rule of every effect that is a decrease: the whole interval is below "no difference"; None without
    one.
    """
    return None if interval is None else interval[1] < none


def above(interval: tuple[float, float] | None, none: float) -> bool | None:
    """Return the same of an increase."""
    return None if interval is None else interval[0] > none
