"""Power laws and intervals against planted curves, of which everything is known."""

import math

import numpy as np
import pytest

from megatron_fanformer.experiments.intervals import (
    Curve,
    Fit,
    Saving,
    fit_together,
    holm,
    mean_of,
    p_value,
    ratio_mean,
    saving,
    t_quantile,
)

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
    fits = fit_together([x.tolist()] * 2, losses, seed=seed, draws=200)
    return fits, saving(*fits, SIZES[-1])


@pytest.mark.parametrize(("freedom", "published"), [(1, 12.7062), (2, 4.30265), (4, 2.77645), (30, 2.04227)])
def test_students_t_is_as_published(freedom: int, published: float) -> None:
    assert t_quantile(freedom) == pytest.approx(published, rel=1e-5)


@pytest.mark.parametrize("seeds", [3, 8])
def test_intervals_cover_the_mean_and_a_tie_is_called_a_win_as_often_as_stated(seeds: int) -> None:
    samples = np.random.default_rng(seeds).normal(size=(4000, seeds)).tolist()
    intervals = [interval for sample in samples if (interval := mean_of(sample).interval) is not None]
    assert np.mean([low <= 0 <= high for low, high in intervals]) == pytest.approx(0.95, abs=0.01)  # 3 standard errors
    assert np.mean([low > 0 for low, _ in intervals]) < 0.025 + 0.008
    ratios = ratio_mean([math.exp(value) for value in samples[0]])
    assert ratios.interval == pytest.approx([math.exp(end) for end in intervals[0]])
    assert mean_of([1.0]).interval is None


def test_p_is_as_published() -> None:
    """Student's t of 4.303 with two degrees of freedom leaves 5% outside; the error of -1, 0 and 1 is √(1/3)."""
    assert p_value([value + 4.303 / 3**0.5 for value in (-1, 0, 1)]) == pytest.approx(0.05, abs=1e-4)


def test_holms_p_values_are_the_papers_steps() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0]


@pytest.mark.parametrize("curve", [TRANSFORMER, Curve(0.0, 20.0, 0.1), Curve(1.7, 410.0, 0.34)])
def test_a_curve_without_noise_is_found(curve: Curve) -> None:
    (fit,) = fit_together([SIZES.tolist()], [[curve.loss(x) for x in SIZES]])
    assert fit.curve.alpha == pytest.approx(curve.alpha, rel=EXPONENT_ERROR)
    assert [fit.curve.loss(x) for x in SIZES] == pytest.approx([curve.loss(x) for x in SIZES], abs=3e-3)


@pytest.mark.parametrize("common", [0.0, pytest.param(2 * NOISE, marks=pytest.mark.full)])
def test_the_savings_interval_covers_a_planted_saving_also_of_runs_that_share_their_noise(
    common: float,
) -> None:
    intervals = [planted(0.692, seed, common=common)[1].interval for seed in range(SIMULATIONS)]
    bounds = [interval for interval in intervals if interval is not None]
    covered = sum(low <= 0.692 <= high for low, high in bounds) / SIMULATIONS
    assert COVERAGE[0] <= covered <= COVERAGE[1]
    shown = sum(high < 1 for _, high in bounds) / SIMULATIONS
    assert shown > 0.95, "a saving of a third is seen at this noise"


def test_a_planted_tie_is_not_called_a_win() -> None:
    intervals = [planted(1.0, seed)[1].interval for seed in range(SIMULATIONS)]
    called = sum(interval is not None and interval[1] < 1 for interval in intervals)
    assert called / SIMULATIONS <= 0.05  # 2.5%, and two standard errors


def test_a_curve_that_does_not_come_to_the_loss_saves_nothing_and_few_points_have_no_interval() -> None:
    worse = Curve(4.5, 60.0, 0.25)
    sizes = SIZES[:4].tolist()
    fits = fit_together([sizes] * 2, [[curve.loss(x) for x in sizes] for curve in (TRANSFORMER, worse)])
    reached = saving(*fits, sizes[-1])
    assert math.isinf(reached.share) and reached.interval is None
