"""Computes intervals and p values over seeds, by Student's t; fits power laws of the loss, and compares their curves.

Student's t assumes losses that are about normal, and with five seeds it is wide (2.78 standard errors to either side);
but a bootstrap of five values would be too narrow (Efron and Tibshirani, An Introduction to the Bootstrap, 12.4).

Power laws L(x) = E + A·x^(−α), where x counts parameters or tokens, are fitted by least squares: E and A by linear
regression for each α of a grid (variable projection: Golub and Pereyra, SIAM J. Numer. Anal. 10, 1973). Intervals come
from a bootstrap of residuals, which are scaled up before: residuals of n points around a curve with three parameters
are too small by √((n − 3)/n), and their spread, if they are few, is as uncertain as Student's t is wider than a normal.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

FEWEST_SEEDS = 3
"""The fewest seeds that can show an effect: with two, an interval is 12.7 standard errors to either side."""
FEWEST_STEPS = 50
"""The fewest steps that can show an effect: losses during a warm-up say nothing about trained models."""
EXPONENTS = np.geomspace(0.02, 3.0, 400)  # values of α, 1.3% apart; published ones lie between 0.05 and 0.8
PARAMETERS = 3  # of a curve: E, A and α
LEAST_FREEDOM = 2  # degrees of freedom of a fit (points beyond the parameters) below which it gets no interval
DRAWS = 1000  # of the bootstrap
NORMAL = 1.959964  # 97.5% quantile of a normal distribution

Interval = tuple[float, float]
"""The low and the high end of a 95% interval; both may be infinite."""


class Mean(NamedTuple):
    """A mean over seeds with its 95% interval, which is None for a single seed."""

    value: float
    interval: Interval | None


@functools.cache
def t_quantile(freedom: int) -> float:
    """Return the 97.5% quantile of Student's t, half of a 95% interval in standard errors; `freedom` is at least 1."""
    low, high = 0.0, 100.0
    while low < (middle := (low + high) / 2) < high:  # bisects until no float lies between low and high
        low, high = (middle, high) if _probability_outside(middle, freedom) > 0.05 else (low, middle)
    return middle


def standard_error(values: Sequence[float] | np.ndarray) -> Any:
    """Return the standard error of the mean over the first axis, which has a value for each of two or more seeds."""
    return np.std(values, axis=0, ddof=1) / math.sqrt(len(values))


def mean_of(values: Sequence[float]) -> Mean:
    """Return the mean of `values`, one for each seed, with its 95% interval."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Mean(mean, None)
    half = t_quantile(len(values) - 1) * float(standard_error(values))
    return Mean(mean, (mean - half, mean + half))


def ratio_mean(values: Sequence[float]) -> Mean:
    """Return the geometric mean of ratios, one for each seed, with its 95% interval; both are taken of logarithms."""
    mean, interval = mean_of([math.log(value) for value in values])
    return Mean(math.exp(mean), None if interval is None else (math.exp(interval[0]), math.exp(interval[1])))


def shortage(*, seeds: int, steps: int) -> str:
    """Return the reason why so few seeds or steps cannot show an effect; an empty text if there are enough."""
    if seeds < FEWEST_SEEDS:
        return f"{seeds} {'seed is' if seeds == 1 else 'seeds are'} fewer than {FEWEST_SEEDS}: inconclusive"
    return f"{steps:,} steps are fewer than {FEWEST_STEPS:,}: inconclusive" if steps < FEWEST_STEPS else ""


def p_value(values: Sequence[float]) -> float:
    """Return the two-sided p value of the hypothesis that the mean is 0, by Student's t; `values` has two or more."""
    error, distance = float(standard_error(values)), abs(float(np.mean(values)))
    # If the standard error is 0, all values are equal: p is 1 if they are 0, and 0 otherwise.
    return _probability_outside(distance / error, len(values) - 1) if error > 0 else float(distance == 0)


def _probability_outside(t: float, freedom: int) -> float:
    """Return the probability that Student's t is further from 0 than `t`: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle, is_odd = math.atan2(t, math.sqrt(freedom)), freedom % 2
    sine, cosine = math.sin(angle), math.cos(angle)
    term, total = cosine if is_odd else 1.0, 0.0
    for power in range(is_odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    inside = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    return max(0.0, 1 - inside)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values adjusted for their number: if no effect exists, the chance that any is below 5% is at most 5%.

    Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 6, 1979.
    """
    adjusted, previous = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        previous = max(previous, min(1.0, (len(p_values) - rank) * p_values[place]))  # adjusted values never decrease
        adjusted[place] = previous
    return adjusted


# -- power laws


class Curve(NamedTuple):
    """L(x) = E + A·x^(−α), in nats per token; E and A are not negative."""

    e: float
    a: float
    alpha: float

    def loss(self, x: Any) -> Any:
        """Return the loss at a number of parameters, or of tokens."""
        return self.e + self.a * x**-self.alpha


class Fit(NamedTuple):
    """A curve fitted through points."""

    curve: Curve
    draws: np.ndarray
    """[draws, 3]: E, A and α of the bootstrap's curves; without rows if there are too few points for an interval."""


class Saving(NamedTuple):
    """Compares a curve with a baseline's: the x at which the curve has the loss of the baseline's largest x."""

    loss: float
    """The baseline's loss at its largest x, by its curve."""
    share: float
    """The curve's x for this loss, over the baseline's largest x; infinite if the curve never reaches the loss."""
    interval: Interval | None
    """95% interval of the share; None if there are too few points."""


def fit_together(
    xs: Sequence[Sequence[float]], losses: Sequence[Sequence[float]], *, seed: int = 0, draws: int = DRAWS
) -> list[Fit]:
    """Fit a curve through each set of points.

    The sets have points of the same sizes and seeds, in the same order. The bootstrap draws the residuals of the same
    points in every set, since runs of one seed see the same samples.

    Args:
        xs: [k, n], the parameters or tokens of the n points of each of k sets; a set has at least three different ones.
        losses: [k, n], the losses at these points.
    """
    n = len(xs[0])
    drawn_points = np.random.default_rng(seed).integers(n, size=(draws, n))
    freedom = n - PARAMETERS
    fits = []
    for x, loss in zip(np.asarray(xs, dtype=float), np.asarray(losses, dtype=float), strict=True):
        curve = Curve(*_best_curves(x, loss[None])[0].tolist())
        curves = np.empty((0, PARAMETERS))
        if freedom >= LEAST_FREEDOM:
            residuals = loss - curve.loss(x)
            scale = math.sqrt(n / freedom) * t_quantile(freedom) / NORMAL  # explained at the top of this file
            curves = _best_curves(x, curve.loss(x) + scale * (residuals - residuals.mean())[drawn_points])
        fits.append(Fit(curve, curves))
    return fits


def saving(baseline: Fit, other: Fit, largest: float) -> Saving:
    """Return the share of `largest` at which the curve of `other` has the loss that the baseline's has at `largest`.

    Args:
        baseline, other: fits that one call of `fit_together` returned.
        largest: the largest x of the baseline's points.
    """
    loss = baseline.curve.loss(largest)
    share = float(_x_at_losses(np.array([other.curve]), np.array([loss]))[0]) / largest
    if not len(baseline.draws):
        return Saving(loss, share, None)
    e, a, alpha = baseline.draws.T
    shares = _x_at_losses(other.draws, e + a * largest**-alpha) / largest
    low, high = np.quantile(shares, (0.025, 0.975), method="nearest").tolist()  # infinite shares cannot be interpolated
    return Saving(loss, share, (low, high))


def _best_curves(x: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Return [k, 3]: E, A and α of the curve nearest to each row of `losses` [k, n], with E and A not negative."""
    scale = math.exp(np.mean(np.log(x)))  # x / scale is about 1, so that its powers do not underflow
    mean = losses.mean(axis=1)
    curves, least = np.empty((len(losses), PARAMETERS)), np.full(len(losses), np.inf)
    for alpha in EXPONENTS:
        power = (x / scale) ** -alpha
        centered = power - power.mean()
        a = np.maximum((losses - mean[:, None]) @ centered / (centered @ centered), 0.0)
        e = mean - a * power.mean()
        # The sum of squares is convex in E and A: where the best E is negative, the best allowed E is 0.
        a = np.where(e < 0, losses @ power / (power @ power), a)
        e = np.maximum(e, 0.0)
        squares = ((losses - e[:, None] - a[:, None] * power) ** 2).sum(axis=1)
        is_better = squares < least
        least = np.where(is_better, squares, least)
        curves[is_better] = np.stack([e, a * scale**alpha, np.full(len(a), alpha)], axis=1)[is_better]
    return curves


def _x_at_losses(curves: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Return the x at which each of k curves [k, 3] has its loss [k]; infinity if it stays above that, 0 if below."""
    e, a, alpha = curves.T
    above_e = losses - e
    is_reached = (above_e > 0) & (a > 0)
    with np.errstate(over="ignore", divide="ignore"):  # an x too large for a float is infinite
        x = (a / np.where(is_reached, above_e, 1.0)) ** (1 / alpha)
    return np.where(is_reached, x, np.where(above_e > 0, 0.0, np.inf))
