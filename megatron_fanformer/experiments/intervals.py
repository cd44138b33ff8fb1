"""95% intervals over seeds: Student's t, and differences paired by seed.

Runs of one seed see the same samples in the same order, so that their losses move together: a difference is taken seed
by seed. With five seeds, t is wide (2.78 standard errors on either side) and needs losses that are about normal; the
bootstrap of five values is narrower than it should be (Efron and Tibshirani, An Introduction to the Bootstrap, 12.4).
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEVEL = 0.95
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


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of one value for each seed, with its 95% interval."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Mean(mean, None)
    half = t_quantile(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Mean(mean, (mean - half, mean + half))
