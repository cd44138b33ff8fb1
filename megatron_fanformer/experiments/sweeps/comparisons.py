"""The comparisons of a sweep's points: differences paired by seed, those stated beforehand corrected for their number.

Runs of one seed see the same samples in the same order, so that their losses move together: a difference is taken seed
by seed. What was not stated before the runs is exploratory: of twenty such differences that are not there, one has an
interval without 0.

An axis such as the learning rates may be tuned: every arm of a comparison is to have the point that suits it. The
choice is by runs of the first seeds, and the comparison by the seeds after them: no arm is flattered by its own choice.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from megatron_fanformer.experiments.intervals import Mean, holm, mean_of, p_value, too_little
from megatron_fanformer.experiments.result import Finding
from megatron_fanformer.experiments.sweeps.cells import Cell, Group, Outcome, Sweep
from megatron_fanformer.experiments.sweeps.config import SweepConfig

CALLED = 0.05  # the adjusted p below which a primary comparison shows


class Comparison(NamedTuple):
    """A point of the compared axis, less a baseline, over the seeds and other points that both have."""

    point: str
    baseline: str
    at: dict[str, str]
    """Its point on each axis of `report.by`."""
    mean: Mean
    seeds: int
    pairs: int
    """Number of pairs of runs; more than the seeds where other axes are averaged over."""
    p: float | None
    """Two-sided p-value of Student's t; None with one seed."""
    adjusted: float | None
    """p corrected for the number of primary comparisons; None if it is exploratory or has no p."""
    is_primary: bool


def comparisons(config: SweepConfig, groups: Sequence[Group]) -> list[Comparison]:
    """Return all comparisons that have runs: of every point with every baseline, and of the primary pairs."""
    pairs = _pairs(config)
    made = []
    for at in itertools.product(*(config.axes[axis] for axis in config.report.by)):
        where = dict(zip(config.report.by, at, strict=True))
        of_these = [group for group in groups if where.items() <= group.points.items()]
        for pair, is_primary in pairs.items():
            if (comparison := _compared(config, of_these, pair, where)) is not None:
                made.append(comparison._replace(is_primary=is_primary))
    tested = {
        place: comparison.p
        for place, comparison in enumerate(made)
        if comparison.is_primary and comparison.p is not None
    }
    # Those that have no runs yet count, too: a verdict by half of a sweep would be another one's.
    to_come = [1.0] * (_num_primary(config) - len(tested))
    for place, adjusted in zip(tested, holm([*tested.values(), *to_come]), strict=False):
        made[place] = made[place]._replace(adjusted=adjusted)
    return made


def _pairs(config: SweepConfig) -> dict[tuple[str, str], bool]:
    """Return the pairs to compare, and whether each is primary: stated beforehand, or the sweep's only comparison."""
    report = config.report
    primary = [(point, baseline) for point, baseline in report.primary]
    pairs = list(primary)
    seen: set[str] = set()
    for baseline in (report.baseline, *report.other_baselines):
        seen.add(baseline)  # two baselines are compared once
        pairs += [(point, baseline) for point in config.axes[report.compare] if point not in seen]
    is_only = len(pairs) * _num_places(config) == 1
    return {pair: pair in primary or is_only for pair in dict.fromkeys(pairs)}


def _num_primary(config: SweepConfig) -> int:
    return sum(_pairs(config).values()) * _num_places(config)


def _num_places(config: SweepConfig) -> int:
    return math.prod(len(config.axes[axis]) for axis in config.report.by)


def axes_apart(config: SweepConfig) -> tuple[str, ...]:
    """Return the axes in which paired runs may differ: the compared one, and a tuned one, whose best is each arm's."""
    return (config.report.compare, *((config.tune.axis,) if config.tune else ()))


def _compared(
    config: SweepConfig, groups: Sequence[Group], pair: tuple[str, str], at: dict[str, str]
) -> Comparison | None:
    """Return the differences of a pair; None where no seed has both."""
    apart = axes_apart(config)

    def losses_of(point: str) -> dict[tuple[object, ...], float]:
        return {
            (seed, *(value for axis, value in group.points.items() if axis not in apart)): loss
            for group in groups
            if group.points[config.report.compare] == point
            for seed, loss in group.losses.items()
        }

    own, of_baseline = map(losses_of, pair)
    by_seed: dict[object, list[float]] = {}
    for key in own.keys() & of_baseline.keys():
        by_seed.setdefault(key[0], []).append(own[key] - of_baseline[key])
    if not by_seed:
        return None
    # Differences of one seed at several sizes are not independent: their mean is one value.
    means = [math.fsum(by_seed[seed]) / len(by_seed[seed]) for seed in sorted(by_seed, key=str)]
    return Comparison(
        *pair,
        at,
        mean_of(means),
        seeds=len(means),
        pairs=sum(map(len, by_seed.values())),
        p=p_value(means) if len(means) > 1 else None,
        adjusted=None,
        is_primary=False,
    )


def findings(config: SweepConfig, compared: Sequence[Comparison], *, steps: int) -> Iterator[Finding]:
    """Yield what each comparison says, the primary ones first.

    Args:
        steps: of the shortest cell.
    """
    report = config.report
    number = _num_primary(config)
    for comparison in sorted(compared, key=lambda comparison: not comparison.is_primary):
        paper = None
        if comparison.point in report.paper and comparison.baseline in report.paper:
            paper = report.paper[comparison.point] - report.paper[comparison.baseline]
        short = too_little(
            seeds=comparison.seeds, steps=steps, fewest_seeds=report.fewest_seeds, fewest_steps=report.fewest_steps
        )
        shows = None
        if comparison.is_primary and not short and comparison.adjusted is not None:
            shows = comparison.adjusted < CALLED and comparison.mean.value < 0
        at = "".join(f", {axis} {point}" for axis, point in comparison.at.items())
        direction = "lower" if comparison.mean.value < 0 else "higher"
        yield Finding(
            name=f"{config.experiment}: loss of {comparison.point}, less {comparison.baseline}'s{at}",
            paper=None if paper is None else f"{paper:+.3f}",
            ours=comparison.mean.value,
            interval=comparison.mean.interval,
            unit="nats per token",
            same_settings=report.same_settings,
            shows=shows,
            exploratory=not comparison.is_primary,
            sentence=(
                f"{comparison.point} ends {abs(comparison.mean.value):.4f} nats per token {direction} than "
                f"{comparison.baseline}{at} over {comparison.pairs} pairs of runs with the same seed; "
                f"{_outcome(comparison, short, number)}. {_rule(comparison)}"
            ),
        )


def _outcome(comparison: Comparison, short: str, number: int) -> str:
    if short or comparison.mean.interval is None:
        return short
    low, high = comparison.mean.interval
    interval = f"the 95% interval, {low:+.4f} to {high:+.4f}, {'has 0 in it' if low <= 0 <= high else 'leaves 0 out'}"
    if comparison.adjusted is None:
        return interval
    corrected = f", corrected for {number} primary comparisons (Holm)" if number > 1 else ""
    return f"{interval}, p {comparison.adjusted:.2g}{corrected}"


def _rule(comparison: Comparison) -> str:
    if not comparison.is_primary:
        return "It is exploratory: not among the comparisons stated before the runs."
    return f"Stated before the runs: {comparison.point} is lower. It shows if p is below {CALLED:.0%}."


# -- the best point of a tuned axis


class Choice(NamedTuple):
    """The tuned axis's result at one point of every other axis."""

    points: dict[str, str]
    """Its point on each of the other axes."""
    losses: dict[str, float | None]
    """Mean loss over the seeds by the tuned axis's point; None while a run has none, or since one diverged."""
    best: str | None
    """The point of the lowest loss; None until every run there has ended, or if all of them diverged."""

    @property
    def is_at_the_edge(self) -> bool:
        """Return whether a better point may lie beyond the axis's first or last."""
        points = list(self.losses)
        return len(points) > 2 and self.best in (points[0], points[-1])


def choices(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Choice]:
    """Return the choice at each point of the axes that are not tuned, in the order of the cells."""
    if sweep.config.tune is None:
        return []
    axis = sweep.config.tune.axis
    ended: dict[tuple[tuple[str, str], ...], dict[str, list[Outcome]]] = {}
    for outcome in outcomes:
        if outcome.cell.tunes:
            others = tuple((name, point) for name, point in outcome.cell.points.items() if name != axis)
            ended.setdefault(others, {}).setdefault(outcome.cell.points[axis], []).append(outcome)
    return [Choice(dict(others), *_best(by_point)) for others, by_point in ended.items()]


def _best(by_point: dict[str, list[Outcome]]) -> tuple[dict[str, float | None], str | None]:
    losses: dict[str, float | None] = {}
    have_ended = True
    for point, of_point in by_point.items():
        known = [outcome.loss for outcome in of_point if outcome.loss is not None]
        losses[point] = float(np.mean(known)) if len(known) == len(of_point) else None
        have_ended &= all(outcome.loss is not None or outcome.diverged for outcome in of_point)
    candidates = {point: loss for point, loss in losses.items() if loss is not None}
    return losses, min(candidates, key=candidates.__getitem__) if have_ended and candidates else None


def compared(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the cells that the comparisons are of: all, or those at the best points of the tuned axis."""
    if sweep.config.tune is None:
        return list(outcomes)
    best = [{**choice.points, sweep.config.tune.axis: choice.best} for choice in choices(sweep, outcomes)]
    return [outcome for outcome in outcomes if not outcome.cell.tunes and outcome.cell.points in best]


def in_play(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the cells that have run or are to run, as far as the choices are made: those for tuning come first."""
    return [*(outcome for outcome in outcomes if outcome.cell.tunes), *compared(sweep, outcomes)]


def unfinished(sweep: Sweep, playing: Sequence[Outcome]) -> list[str]:
    """Return what keeps a sweep of which nothing is due from its result, one line each."""
    problems = [
        f"{outcome.cell.name} has no {sweep.metric} at its last step; remove {outcome.cell.run} to train it again"
        for outcome in playing
        if outcome.state == "complete" and outcome.loss is None
    ]
    if sweep.config.tune is not None and not problems:
        axis = sweep.config.tune.axis
        problems = [
            f"all points of {axis} diverged{''.join(f', {point}' for point in choice.points.values())}; add others"
            for choice in choices(sweep, playing)
            if choice.best is None
        ]
    return problems


def due(playing: Sequence[Outcome]) -> list[Cell]:
    """Return what, of the cells in play, can run now and is not complete; a choice that is made then brings more."""
    # A tuning run that diverged would again: it has said what it was to say.
    return [
        outcome.cell
        for outcome in playing
        if outcome.state != "complete" and not (outcome.cell.tunes and outcome.diverged)
    ]
