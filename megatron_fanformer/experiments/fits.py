"""Power laws of the loss, L(x) = E + A·x^(−α), with x the parameters or the tokens, and what one curve saves another.

For a given α the curve is linear in E and A, which least squares gives at once: what is left is one dimension, and a
grid over all sensible α finds the best one wherever it lies (variable projection: Golub and Pereyra, SIAM J. Numer.
Anal. 10, 1973). No start is guessed and no local minimum is taken for the best.
(Hoffmann et al., "Training Compute-Optimal Large Language Models", 2022, fit logarithms from a grid of starts with a
Huber loss: theirs are fits of five parameters.)

**Intervals** are by the bootstrap of residuals: what the points are off the curve is drawn anew, with replacement, laid
on the fitted curve, and fitted again. The residuals of n points around a curve with three parameters are too small by
√((n − 3)/n), and the spread of few of them is itself uncertain, which Student's t answers for: they are scaled by both.
Of two curves whose points are of the same runs' sizes and seeds, the residuals are drawn together, since runs of one
seed see the same samples.

**The saving at equal loss** is the share of x with which one curve reaches the loss that the baseline has at its
largest x: 0.69 is "the Transformer's loss with 69% of its parameters".
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megatron_fanformer.experiments.intervals import t_quantile

EXPONENTS = np.geomspace(0.02, 3.0, 400)  # 1.3% apart; published ones lie between 0.05 and 0.8
PARAMETERS = 3
LEAST_FREEDOM = 2  # points beyond the parameters, below which no interval is given
DRAWS = 1000
NORMAL = 1.959964  # 97.5% quantile of a normal distribution


class Curve(NamedTuple):
    """L(x) = E + A·x^(−α), in nats per token."""

    e: float
    """The loss that remains at any size, E."""
    a: float
    """The factor A, not negative."""
    alpha: float

    def loss(self, x: float) -> float:
        """Return the loss at a number of parameters, or of tokens."""
        return self.e + self.a * x**-self.alpha

    def reaches(self, loss: float) -> float:
        """Return the x that has a loss; infinite where none has."""
        return float(_reaching(np.array([self]), np.array([loss]))[0])


class Interval(NamedTuple):
    """A 95% interval; infinite at an end that no number bounds."""

    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A curve fitted through points."""

    curve: Curve
    draws: np.ndarray
    """[draws, 3]: E, A and α of the bootstrap's curves; no rows where there are too few points for an interval."""
    residual: float
    """Root mean square distance of the points from the curve, in nats per token."""

    @property
    def intervals(self) -> list[Interval] | None:
        """Return the intervals of E, A and α; None where there are too few points."""
        return [_interval(column) for column in self.draws.T] if len(self.draws) else None


@dataclass(frozen=True, kw_only=True)
class Saving:
    """The share of the baseline's largest x at which a curve reaches the baseline's loss."""

    at: float
    """The baseline's largest x."""
    loss: float
    """The baseline's loss at that x, by its curve."""
    share: float
    """The curve's x for the same loss over that x; infinite where the curve does not reach that loss."""
    interval: Interval | None
    """95% interval of the share; None with too few points."""


def fit_together(
    xs: Sequence[Sequence[float]],
    losses: Sequence[Sequence[float]],
    *,
    paired: bool,
    seed: int = 0,
    draws: int = DRAWS,
) -> list[Fit]:
    """Fit a curve through each set of points.

    Args:
        xs: parameters or tokens of each set's points, three different ones at least.
        losses: of the same points.
        paired: whether the sets' points are of the same seeds, in the same order: their residuals are drawn together.
    """
    generator = np.random.default_rng(seed)
    together = generator.integers(len(xs[0]), size=(draws, len(xs[0]))) if paired else None
    fits = []
    for x_values, loss_values in zip(xs, losses, strict=True):
        x, loss = np.asarray(x_values, dtype=float), np.asarray(loss_values, dtype=float)
        curve = Curve(*_best_curves(x, loss[None])[0].tolist())
        fitted = curve.e + curve.a * x**-curve.alpha
        off = loss - fitted
        freedom = len(x) - PARAMETERS
        found = np.empty((0, PARAMETERS))
        if freedom >= LEAST_FREEDOM:
            scale = math.sqrt(len(x) / freedom) * t_quantile(freedom) / NORMAL
            drawn = generator.integers(len(x), size=(draws, len(x))) if together is None else together
            found = _best_curves(x, fitted + scale * (off - off.mean())[drawn])
        fits.append(Fit(curve=curve, draws=found, residual=float(np.sqrt(np.mean(off**2)))))
    return fits


def saving(baseline: Fit, other: Fit, largest: float) -> Saving:
    """Compute the x at which `other` has the loss that `baseline` has at its largest x.

    Args:
        baseline, other: of one `fit_together`.
    """
    loss = baseline.curve.loss(largest)
    interval = None
    if len(baseline.draws) and len(other.draws):
        e, a, alpha = baseline.draws.T
        interval = _interval(_reaching(other.draws, e + a * largest**-alpha) / largest)
    return Saving(at=largest, loss=loss, share=other.curve.reaches(loss) / largest, interval=interval)


def _best_curves(x: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Return [k, 3]: E, A and α of the curve nearest to each row of `losses` [k, n], by least squares with E and A ≥
    0.
    """
    scale = math.exp(np.mean(np.log(x)))  # about 1, for the arithmetic
    mean = losses.mean(axis=1)
    curves, least = np.empty((len(losses), PARAMETERS)), np.full(len(losses), np.inf)
    for alpha in EXPONENTS:
        power = (x / scale) ** -alpha
        centred = power - power.mean()
        a = np.maximum((losses - mean[:, None]) @ centred / (centred @ centred), 0.0)
        e = mean - a * power.mean()
        # Squares are convex in E and A: where the best E is negative, the best allowed one is 0.
        a = np.where(e < 0, losses @ power / (power @ power), a)
        e = np.maximum(e, 0.0)
        squares = ((losses - e[:, None] - a[:, None] * power) ** 2).sum(axis=1)
        is_better = squares < least
        least = np.where(is_better, squares, least)
        curves[is_better] = np.stack([e, a * scale**alpha, np.full(len(a), alpha)], axis=1)[is_better]
    return curves


def _reaching(curves: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """Return the x at which each curve [k, 3] has its loss [k]; infinite where it never has."""
    e, a, alpha = curves.T
    above = losses - e
    is_reached = (above > 0) & (a > 0)
    safe = np.where(is_reached, above, 1.0)
    with np.errstate(over="ignore", divide="ignore"):
        x = (a / safe) ** (1 / alpha)
    return np.where(is_reached, x, np.where(above > 0, 0.0, np.inf))


def _interval(values: np.ndarray) -> Interval:
    low, high = np.quantile(values, (0.025, 0.975), method="nearest")
    return Interval(float(low), float(high))
