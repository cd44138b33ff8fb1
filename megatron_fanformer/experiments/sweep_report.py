"""Reports a sweep: means with intervals over seeds, differences from the baseline, power laws, and missing cells.

Runs of one seed see the same samples in the same order: differences are taken seed by seed. Comparisons that were
stated before the runs are corrected for their number, others are exploratory. All numbers come from the runs' folders,
so a sweep that was stopped and resumed has the same report as one that was not, except for the seconds.
"""

import csv
import dataclasses
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.experiments.cells import FITTED, Sweep, SweepConfig
from megatron_fanformer.experiments.intervals import Fit, Mean, fit_together, holm, mean_of, p_value, saving, shortage
from megatron_fanformer.experiments.outcomes import (
    Group,
    Outcome,
    choices,
    compared,
    group_by_points,
    in_play,
    outcomes,
)
from megatron_fanformer.experiments.result import Cell as TableCell
from megatron_fanformer.experiments.result import Finding, Measured, Result, Table, write_folder
from megatron_fanformer.pictures import render_png, set_logarithmic
from megatron_fanformer.plan.job import training_flops_per_token

CSV = "cells.csv"
PICTURE = "losses.png"
MISSING = "Cells without a loss"  # title of a table
FEWEST_SIZES = 4  # a curve with three parameters goes through any three points
SIGNIFICANT = 0.05  # the adjusted p below which a primary comparison shows


def write_report(sweep: Sweep) -> Result:
    """Write result.json, a picture, cells.csv and README.md into the sweep's folder.

    Raises:
        InputError: no cell is complete.
    """
    playing = in_play(sweep, outcomes(sweep))
    groups = group_by_points(compared(sweep, playing))
    if not any(group.losses for group in groups):
        raise InputError(f"no cell of {sweep.folder} has {sweep.metric} at its last step; use run, or status")
    fits = _fits(sweep, groups) if sweep.config.report.over in FITTED else {}
    steps = min(cell.config.training.steps for cell in sweep.cells)
    if fits:
        effects = _savings(sweep, groups, fits, steps)
    else:
        effects = findings(sweep.config, comparisons(sweep.config, groups), steps=steps)
    measured = Measured(
        findings=list(effects),
        tables=list(_tables(sweep, groups, fits, playing)),
        pictures={PICTURE: _picture(sweep, groups, fits)},
        seconds=sum(outcome.seconds for outcome in playing),
    )
    settings = {
        "sweep": dataclasses.asdict(sweep.config),
        "metric": sweep.metric,
        "first cell": sweep.cells[0].config.as_dict(),
    }
    write_atomically(sweep.folder / CSV, _csv(sweep, playing))
    return write_folder(sweep.folder, sweep.config.experiment, settings, measured)


# -- comparisons


class Comparison(NamedTuple):
    """A point's loss minus a baseline's, over the seeds and the points of other axes at which both have runs."""

    point: str
    baseline: str
    at: dict[str, str]
    """The point on each axis of `report.by`."""
    mean: Mean
    seeds: int  # number of seeds
    pairs: int  # number of pairs of runs: more than the seeds if the losses of several points are averaged
    p: float | None
    """Two-sided p value of Student's t; None with one seed."""
    is_primary: bool  # stated before the runs
    adjusted: float | None = None
    """p corrected for the number of primary comparisons; None if the comparison is exploratory, or has no p."""


def comparisons(config: SweepConfig, groups: Sequence[Group]) -> list[Comparison]:
    """Return all comparisons that have runs: the primary pairs, and every point with the baseline."""
    all_comparisons: list[Comparison] = []
    for points in itertools.product(*(config.axes[axis] for axis in config.report.by)):
        at = dict(zip(config.report.by, points, strict=True))
        groups_there = [group for group in groups if at.items() <= group.points.items()]
        for pair, is_primary in _is_primary_by_pair(config).items():
            values, pairs = _paired_differences(config, groups_there, pair)
            if values:
                p = p_value(values) if len(values) > 1 else None
                mean = mean_of(values)
                all_comparisons.append(Comparison(*pair, at, mean, len(values), pairs, p, is_primary))
    tested = {
        number: comparison.p
        for number, comparison in enumerate(all_comparisons)
        if comparison.is_primary and comparison.p is not None
    }
    # Primary comparisons without a p yet count with p 1: otherwise the correction would grow as the sweep goes on. They
    # are last, so that zip leaves out their adjusted values.
    to_come = [1.0] * (_num_primary(config) - len(tested))
    for number, adjusted in zip(tested, holm([*tested.values(), *to_come]), strict=False):
        all_comparisons[number] = all_comparisons[number]._replace(adjusted=adjusted)
    return all_comparisons


def _is_primary_by_pair(config: SweepConfig) -> dict[tuple[str, str], bool]:
    """Return for each pair to compare whether it is primary: stated before the runs, or the sweep's only comparison."""
    report = config.report
    others = [(point, report.baseline) for point in config.axes[report.compare] if point != report.baseline]
    pairs = dict.fromkeys([*report.primary, *others])
    is_only = len(pairs) == 1 and _num_combinations(config) == 1
    return {pair: pair in report.primary or is_only for pair in pairs}


def _num_primary(config: SweepConfig) -> int:  # of primary comparisons, also of those without runs yet
    return sum(_is_primary_by_pair(config).values()) * _num_combinations(config)


def _num_combinations(config: SweepConfig) -> int:  # of the points of `report.by`
    return math.prod(len(config.axes[axis]) for axis in config.report.by)


def _runs_by_key(config: SweepConfig, groups: Sequence[Group], point: str) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """Return each run's loss and group, at a point, by a key that the runs of a pair share: seed and other points."""
    # A pair differs on the compared axis, and may differ on a tuned one, since each compared point is tuned by itself.
    apart = (config.report.compare, config.tune)
    return {
        (seed, *(value for axis, value in group.points.items() if axis not in apart)): (loss, group)
        for group in groups
        if group.points[config.report.compare] == point
        for seed, loss in group.losses.items()
    }


def _paired_differences(config: SweepConfig, groups: Sequence[Group], pair: tuple[str, str]) -> tuple[list[float], int]:
    """Return the point's loss minus the baseline's, a mean for each seed that has both, and the number of run pairs."""
    point_runs, baseline_runs = (_runs_by_key(config, groups, point) for point in pair)
    differences_by_seed: dict[Any, list[float]] = {}
    for key in point_runs.keys() & baseline_runs.keys():
        seed, difference = key[0], point_runs[key][0] - baseline_runs[key][0]
        differences_by_seed.setdefault(seed, []).append(difference)
    # Differences of one seed at several sizes are not independent: their mean is one value.
    means = [math.fsum(differences) / len(differences) for _, differences in sorted(differences_by_seed.items())]
    return means, sum(map(len, differences_by_seed.values()))


def findings(config: SweepConfig, compared: Sequence[Comparison], *, steps: int) -> Iterator[Finding]:
    """Yield the finding of each comparison, the primary ones first.

    Args:
        steps: the number of steps of the shortest cell.
    """
    report = config.report
    for comparison in sorted(compared, key=lambda comparison: not comparison.is_primary):
        point, baseline, (value, interval) = comparison.point, comparison.baseline, comparison.mean
        outcome = shortage(seeds=comparison.seeds, steps=steps)
        shows = None
        if not outcome and interval is not None:  # enough seeds have an interval
            outcome = f"the 95% interval is {interval[0]:+.4f} to {interval[1]:+.4f}"
            if comparison.adjusted is not None:
                shows = comparison.adjusted < SIGNIFICANT and value < 0
                number = _num_primary(config)
                corrected = f", corrected for {number} primary comparisons (Holm)" if number > 1 else ""
                outcome += f", p {comparison.adjusted:.2g}{corrected}"
        rule = (
            f"Stated before the runs: {point} is lower. It shows if p is below {SIGNIFICANT:.0%}."
            if comparison.is_primary
            else "It is exploratory: not among the comparisons stated before the runs."
        )
        is_in_paper = point in report.paper and baseline in report.paper
        where = "".join(f", {axis} {point_there}" for axis, point_there in comparison.at.items())
        yield Finding(
            name=f"{config.experiment}: loss of {point}, less {baseline}'s{where}",
            paper=f"{report.paper[point] - report.paper[baseline]:+.3f}" if is_in_paper else None,
            ours=value,
            interval=interval,
            unit="nats per token",
            shows=shows,
            exploratory=not comparison.is_primary,
            sentence=(
                f"{point} ends {abs(value):.4f} nats per token {'lower' if value < 0 else 'higher'} than "
                f"{baseline}{where} over {comparison.pairs} pairs of runs with the same seed; {outcome}. {rule}"
            ),
        )


# -- power laws


def _fits(sweep: Sweep, groups: Sequence[Group]) -> dict[str, Fit]:
    """Fit a power law to each compared point, over sizes and seeds that all have; return {} below FEWEST_SIZES."""
    config, points = sweep.config, sweep.config.axes[sweep.config.report.compare]
    runs_by_point = {point: runs for point in points if (runs := _runs_by_key(config, groups, point))}
    keys = sorted(set.intersection(*(set(runs) for runs in runs_by_point.values())))
    shared_runs = [[runs[key] for key in keys] for runs in runs_by_point.values()]  # a list for each point
    xs = [[sweep.size_of(group.cell) for _loss, group in runs] for runs in shared_runs]
    if min(len({*sizes}) for sizes in xs) < FEWEST_SIZES:
        return {}
    losses = [[loss for loss, _group in runs] for runs in shared_runs]
    return dict(zip(runs_by_point, fit_together(xs, losses), strict=True))


def _savings(sweep: Sweep, groups: Sequence[Group], fits: dict[str, Fit], steps: int) -> Iterator[Finding]:
    """Yield, for each other point, the share of the baseline's parameters or tokens that it needs for the same loss."""
    report = sweep.config.report
    if report.baseline not in fits:
        return
    shortage_text = shortage(seeds=min(len(group.losses) for group in groups if group.losses), steps=steps)
    baseline_groups = [group for group in groups if group.points[report.compare] == report.baseline and group.losses]
    largest = max(sweep.size_of(group.cell) for group in baseline_groups)
    for point, fit in fits.items():
        if point == report.baseline:
            continue
        reached = saving(fits[report.baseline], fit, largest)
        low, high = reached.interval or (math.inf, math.inf)  # without an interval, as if both ends were infinite
        is_finite = math.isfinite(reached.share)
        needs = f"needs {reached.share:.1%} of them" if is_finite else "does not come to that loss by its curve"
        spread = (
            "there are too few runs for an interval, so that this is inconclusive"
            if reached.interval is None
            else f"the 95% interval is {low:.1%} to {high:.1%}"
        )
        yield Finding(
            name=f"{sweep.config.experiment}: {report.over} that {point} needs for {report.baseline}'s loss",
            paper=None if report.paper_saving is None else f"{report.paper_saving:.1%}",
            ours=100 * reached.share if is_finite else None,
            interval=None if math.isinf(low) else (100 * low, None if math.isinf(high) else 100 * high),
            unit=f"% of {report.baseline}'s {report.over}",
            shows=None if shortage_text or reached.interval is None else high < 1,
            sentence=(
                f"For the loss of {reached.loss:.4f} nats per token that {report.baseline}'s fitted curve has at "
                f"{largest:.3g} {report.over}, {point} {needs}; {shortage_text or spread}. The effect is said to show "
                "if the 95% interval lies below 100%."
            ),
        )


# -- tables and pictures


def _tables(sweep: Sweep, groups: Sequence[Group], fits: dict[str, Fit], playing: Sequence[Outcome]) -> Iterator[Table]:
    config = sweep.config
    rows: list[list[TableCell]] = []
    for group in groups:
        mean, interval = mean_of(list(group.losses.values())) if group.losses else (None, None)
        sizes = [group.cell.parameters, group.cell.tokens, len(group.losses)]
        rows.append([*group.points.values(), *sizes, mean, *(interval or (None, None))])
    yield Table(
        title=f"{sweep.metric} by point: mean and 95% interval over seeds (Student's t)",
        columns=[*config.axes, "parameters", "tokens", "seeds", "mean loss", "from", "to"],
        rows=rows,
    )
    if fits:
        title = f"E + A·x^(−α) over {config.report.over}, by least squares"
        curves: list[list[TableCell]] = [[point, *fit.curve] for point, fit in fits.items()]
        yield Table(title=title, columns=[config.report.compare, "E", "A", "α"], rows=curves)
    if config.tune is not None:
        others = [name for name in config.axes if name != config.tune]
        yield Table(
            title=f"{sweep.metric} by {config.tune}, of a seed that no comparison has",
            columns=[*others, *config.axes[config.tune], "best", "at the edge"],
            rows=[
                [*choice.points.values(), *choice.losses.values(), choice.best, choice.is_at_the_edge]
                for choice in choices(sweep, playing)
            ],
        )
    if missing := [outcome for outcome in playing if outcome.loss is None]:
        states: list[list[TableCell]] = [[outcome.cell.name, str(outcome)] for outcome in missing]
        yield Table(title=MISSING, columns=["cell", "state"], rows=states)


def _csv(sweep: Sweep, playing: Sequence[Outcome]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    numbers = ["parameters", "tokens", "flops", "state", "step", "loss"]
    writer.writerow(["cell", *sweep.config.axes, "seed", "tunes", *numbers])
    for outcome in playing:
        cell = outcome.cell
        flops = training_flops_per_token(cell.config.model) * cell.tokens
        names = [cell.name, *cell.points.values(), cell.config.training.seed, cell.tunes]
        writer.writerow([*names, cell.parameters, cell.tokens, flops, outcome.state, outcome.step, outcome.loss])
    return text.getvalue()


def _picture(sweep: Sweep, groups: Sequence[Group], fits: dict[str, Fit]) -> bytes:
    """Return a PNG with a dot for each run, each point's mean and 95% interval, and the fitted curves.

    If losses are drawn over a field of the configuration, the baseline is a horizontal line.
    """
    report = sweep.config.report
    shown = [group for group in groups if group.losses]
    points = list(sweep.config.axes[report.compare])

    def draw(panels: Any) -> None:
        axes = panels[0, 0]
        for place, group in enumerate(shown):
            losses, point = list(group.losses.values()), group.points[report.compare]
            mean, interval = mean_of(losses)
            low, high = interval or (mean, mean)
            if report.over not in (None, *FITTED) and point == report.baseline:
                axes.axhline(mean, linestyle="--", color="black", label=report.baseline)
                axes.axhspan(low, high, color="black", alpha=0.08)
                continue
            x = sweep.size_of(group.cell) if report.over else place
            color = f"C{points.index(point)}"
            axes.errorbar([x], [mean], yerr=[[mean - low], [high - mean]], fmt="o", color=color, capsize=3)
            axes.plot([x] * len(losses), losses, ".", color=color, alpha=0.5)
        for point, fit in fits.items():
            sizes = [sweep.size_of(group.cell) for group in shown if group.points[report.compare] == point]
            xs, (e, a, alpha) = np.geomspace(min(sizes), max(sizes), 100), fit.curve
            label = f"{point}: {e:.3g} + {a:.3g}·x^−{alpha:.3g}"
            axes.plot(xs, fit.curve.loss(xs), color=f"C{points.index(point)}", label=label)
        axes.set(xlabel=report.over, ylabel=f"{sweep.metric}, nats per token", title=sweep.config.experiment)
        if report.over is None:
            names = [" ".join(group.points.values()) for group in shown]
            axes.set_xticks(range(len(shown)), names, rotation=20, ha="right", fontsize="small")
        elif report.over in FITTED:
            set_logarithmic(axes.xaxis, axes.yaxis)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()

    return render_png(draw)
