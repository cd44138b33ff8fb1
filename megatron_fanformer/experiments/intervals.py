"""95% intervals over seeds, and tests of several differences at once: Student's t, Holm's correction.

Runs of one seed see the same samples in the same order, so that their losses move together: a difference is taken seed
by seed. With five seeds, t is wide (2.78 standard errors on either side) and needs losses that are about normal; the
bootstrap of five values is narrower than it should be (Efron and Tibshirani, An Introduction to the Bootstrap, 12.4).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

LEVEL = 0.95
FEWEST_SEEDS = 3
"""The fewest seeds that show anything: with two, t is 12.7 standard errors on either side, and a fourth seed often
falls outside."""
FEWEST_STEPS = 50
"""The fewest steps that show anything: shorter runs are a warm-up, whose losses say nothing about trained models."""
STEPS = 200_001  # of the angle over which the density is summed; the quantiles are exact to six digits


class Mean(NamedTuple):
    """A mean with its interval; None where a single value has none."""

    value: float
    interval: tuple[float, float] | None


@functools.cache
def t_quantile(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t: half of a 95% interval, in standard errors.

    Args:
        freedom: degrees of freedom, at least 1.
    """
    # With t = √ν tan θ the density of t is cos^(ν−1) θ, which is smooth on (−π/2, π/2).
    angle = np.linspace(-math.pi / 2, math.pi / 2, STEPS)
    density = np.cos(angle) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    upper = (1 + LEVEL) / 2
    return math.sqrt(freedom) * math.tan(float(np.interp(upper, below / below[-1], angle)))


def standard_error(values: Sequence[float] | np.ndarray) -> Any:
    """Return the standard error of the mean over the first axis, which has a value for each seed, at least two."""
    return np.std(values, axis=0, ddof=1) / math.sqrt(len(values))


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of one value for each seed, with its 95% interval."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Mean(mean, None)
    half = t_quantile(len(values) - 1) * float(standard_error(values))
    return Mean(mean, (mean - half, mean + half))


def too_little(*, seeds: int, steps: int, fewest_seeds: int = FEWEST_SEEDS, fewest_steps: int = FEWEST_STEPS) -> str:
    """Describe why so many seeds and steps show nothing, whatever the numbers say; empty where they can."""
    if seeds < fewest_seeds:
        return f"{seeds} {'seed is' if seeds == 1 else 'seeds are'} fewer than {fewest_seeds}: inconclusive"
    return f"{steps:,} steps are fewer than {fewest_steps:,}: inconclusive" if steps < fewest_steps else ""


def p_value(values: Sequence[float]) -> float:
    """Return the two-sided p of a mean of 0, by Student's t.

    Args:
        values: one for each seed, at least two.
    """
    error = float(standard_error(values))
    mean = abs(float(np.mean(values)))
    return _outside(mean / error, len(values) - 1) if error > 0 else float(mean == 0)


def _outside(t: float, freedom: int) -> float:
    """Return the probability that Student's t is further from 0: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = (cosine, 0.0) if freedom % 2 else (1.0, 0.0)
    for power in range(1 if freedom % 2 else 0, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    inside = 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total
    return max(0.0, 1 - inside)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted for their number: one below 5% is called with all of them in 5% of null families.

    Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6, 1979.
    """
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = least
    return adjusted


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
