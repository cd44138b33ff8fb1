"""Power laws and intervals against planted curves, of which everything is known."""

import math

import numpy as np
import pytest

from megatron_fanformer.experiments.fits import Curve, Fit, Saving, fit_together, saving
from megatron_fanformer.experiments.intervals import mean_of, t_quantile

SIZES = np.geomspace(1e5, 3e6, 6)
SEEDS = 3
NOISE = 0.01  # nats per token, as losses of small runs differ by seed
TRANSFORMER = Curve(2.0, 60.0, 0.25)
SIMULATIONS = 200
COVERAGE = (0.92, 0.98)  # 95% ± 3: two standard errors of 200 simulations
EXPONENT_ERROR = 0.02  # how far apart the finer grid's exponents are


def saving_curve(share: float) -> Curve:
    """Comes to the Transformer's loss with a share of the parameters, at every size."""
    return TRANSFORMER._replace(a=TRANSFORMER.a * share**TRANSFORMER.alpha)


def planted(share: float, seed: int, *, common: float = 0.0) -> tuple[list[Fit], Saving]:
    """What is found of a planted saving; `common` is the noise that both curves' runs of one seed share."""
    generator = np.random.default_rng(seed)
    x = np.repeat(SIZES, SEEDS)
    shared = common * generator.normal(size=len(x))
    losses = [
        [curve.loss(size) + NOISE * generator.normal() + off for size, off in zip(x, shared, strict=True)]
        for curve in (TRANSFORMER, saving_curve(share))
    ]
    fits = fit_together([x.tolist()] * 2, losses, paired=True, seed=seed, draws=200)
    return fits, saving(*fits, SIZES[-1])


@pytest.mark.parametrize(("freedom", "published"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (30, 2.04227)])
def test_students_t_is_as_published(freedom: int, published: float) -> None:
    assert t_quantile(freedom) == pytest.approx(published, rel=1e-5)


def test_intervals_of_means_cover_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    found = [mean_of(generator.normal(size=3).tolist()).interval for _ in range(4000)]
    covered = np.mean([each is not None and each[0] <= 0 <= each[1] for each in found])
    assert covered == pytest.approx(0.95, abs=0.01)  # three standard errors
    assert mean_of([1.0]).interval is None


@pytest.mark.parametrize("curve", [TRANSFORMER, Curve(0.0, 20.0, 0.1), Curve(1.7, 410.0, 0.34)])
def test_a_curve_without_noise_is_found(curve: Curve) -> None:
    (fit,) = fit_together([SIZES.tolist()], [[curve.loss(x) for x in SIZES]], paired=False)
    assert fit.curve.alpha == pytest.approx(curve.alpha, rel=EXPONENT_ERROR)
    assert fit.residual < 2e-3  # a fifth of the noise
    assert [fit.curve.loss(x) for x in SIZES] == pytest.approx([curve.loss(x) for x in SIZES], abs=3e-3)


@pytest.mark.parametrize("common", [0.0, pytest.param(2 * NOISE, marks=pytest.mark.full)])
def test_the_savings_interval_covers_a_planted_saving_also_of_runs_that_share_their_noise(
    common: float,
) -> None:
    found = [planted(0.692, seed, common=common)[1].interval for seed in range(SIMULATIONS)]
    bounds = [each for each in found if each is not None]
    covered = sum(low <= 0.692 <= high for low, high in bounds) / SIMULATIONS
    assert COVERAGE[0] <= covered <= COVERAGE[1]
    shown = sum(high < 1 for _, high in bounds) / SIMULATIONS
    assert shown > 0.95, "a saving of a third is seen at this noise"


def test_a_planted_tie_is_not_called_a_win() -> None:
    found = [planted(1.0, seed)[1].interval for seed in range(SIMULATIONS)]
    called = sum(each is not None and each.high < 1 for each in found)
    assert called / SIMULATIONS <= 0.05  # 2.5%, and two standard errors


def test_a_curve_that_does_not_come_to_the_loss_saves_nothing_and_few_points_have_no_interval() -> None:
    worse = Curve(4.5, 60.0, 0.25)
    sizes = SIZES[:4].tolist()
    fits = fit_together([sizes] * 2, [[curve.loss(x) for x in sizes] for curve in (TRANSFORMER, worse)], paired=True)
    found = saving(*fits, sizes[-1])
    assert math.isinf(found.share) and found.interval is None
