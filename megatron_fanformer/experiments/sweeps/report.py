"""The results of a sweep: means with intervals over seeds, differences to the baseline, power laws, the missing cells.

Every number is of the runs' folders alone, so that a sweep that was stopped and resumed has the report of one that was
not, but for the seconds.
"""

import csv
import dataclasses
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.errors import InputError
from megatron_fanformer.experiments.fits import Fit, fit_together, saving
from megatron_fanformer.experiments.intervals import Mean, mean_of, too_little
from megatron_fanformer.experiments.report.page import README, write_folder
from megatron_fanformer.experiments.result import Cell as TableCell
from megatron_fanformer.experiments.result import Finding, Result, Table, this_machine
from megatron_fanformer.experiments.sweeps.cells import (
    Group,
    Outcome,
    Sweep,
    groups_of,
    outcomes,
    parameters_of,
    size_of,
)
from megatron_fanformer.experiments.sweeps.comparisons import (
    axes_apart,
    choices,
    compared,
    comparisons,
    findings,
    in_play,
)
from megatron_fanformer.experiments.sweeps.config import FITTED
from megatron_fanformer.pictures import drawn, set_logarithmic
from megatron_fanformer.plan.flops import training_flops_per_token

CSV = "cells.csv"
PICTURE = "losses.png"
MISSING = "Cells without a loss"  # the title of their table
FEWEST_SIZES = 4  # three parameters of a power law need one more, to be a fit


def write_report(sweep: Sweep) -> Result:
    """Write result.json, pictures, cells.csv and README.md into the sweep's folder.

    Raises:
        InputError: no cell is complete.
    """
    outcomes_in_play = in_play(sweep, outcomes(sweep))
    groups = groups_of(compared(sweep, outcomes_in_play))
    if not any(group.losses for group in groups):
        raise InputError(f"no cell of {sweep.folder} has {sweep.metric} at its last step; use run, or status")
    fits = _fits(sweep, groups) if sweep.config.report.over in FITTED else {}
    steps = min(cell.config.training.steps for cell in sweep.cells)
    if fits:
        effects = list(_savings(sweep, groups, fits, steps))
    else:
        effects = list(findings(sweep.config, comparisons(sweep.config, groups), steps=steps))
    tables = [_table_of_groups(sweep, groups), *_table_of_fits(sweep, fits)]
    tables += [*_table_of_choices(sweep, outcomes_in_play), *_table_of_missing(outcomes_in_play)]
    picture = law_picture(sweep, groups, fits) if sweep.config.report.over in FITTED else points_picture(sweep, groups)
    result = Result(
        experiment=sweep.config.experiment,
        settings={
            "sweep": dataclasses.asdict(sweep.config),
            "metric": sweep.metric,
            "first cell": sweep.cells[0].config.as_dict(),
        },
        machine=this_machine(),
        seconds=sum(outcome.seconds for outcome in outcomes_in_play),
        findings=effects,
        tables=tables,
        pictures=[PICTURE],
    )
    write_folder(sweep.folder, result, {PICTURE: picture, CSV: _csv(sweep, outcomes_in_play)})
    return result


# -- power laws


def _fits(sweep: Sweep, groups: Sequence[Group]) -> dict[str, Fit]:
    """Fit the losses of each point of the compared axis, but of those with too few sizes."""
    apart = axes_apart(sweep.config)
    points: dict[str, list[tuple[object, float, float]]] = {}
    for group in groups:
        key = tuple(value for axis, value in group.points.items() if axis not in apart)
        for seed, loss in group.losses.items():
            point = group.points[sweep.config.report.compare]
            points.setdefault(point, []).append(((key, seed), size_of(sweep, group.cell), loss))
    fitted = {
        point: sorted(of_point, key=lambda entry: str(entry[0]))  # in one order, so that residuals are drawn together
        for point, of_point in points.items()
        if len({x for _, x, _ in of_point}) >= FEWEST_SIZES
    }
    xs = [[x for _, x, _ in of_point] for of_point in fitted.values()]
    losses = [[loss for _, _, loss in of_point] for of_point in fitted.values()]
    paired = len({tuple(key for key, _, _ in of_point) for of_point in fitted.values()}) == 1
    return dict(zip(fitted, fit_together(xs, losses, paired=paired), strict=True)) if fitted else {}


def _savings(sweep: Sweep, groups: Sequence[Group], fits: dict[str, Fit], steps: int) -> Iterator[Finding]:
    report = sweep.config.report
    if report.baseline not in fits:
        return
    seeds = min(len(group.losses) for group in groups if group.points[report.compare] in fits and group.losses)
    short = too_little(seeds=seeds, steps=steps, fewest_seeds=report.fewest_seeds, fewest_steps=report.fewest_steps)
    of_baseline = [group for group in groups if group.points[report.compare] == report.baseline and group.losses]
    largest = max(size_of(sweep, group.cell) for group in of_baseline)
    for point, fit in fits.items():
        if point == report.baseline:
            continue
        reached = saving(fits[report.baseline], fit, largest)
        low, high = reached.interval or (math.inf, math.inf)
        is_finite = math.isfinite(reached.share)
        needs = f"needs {reached.share:.1%} of them" if is_finite else "does not come to that loss by its curve"
        if short:
            outcome = short
        elif reached.interval is None:
            outcome = "there are too few runs for an interval, so that this is inconclusive"
        elif high < 1:
            outcome = "the interval lies below 100%: a saving is shown"
        elif low > 1:
            outcome = "the interval lies above 100%: it needs more"
        else:
            outcome = "the interval has 100% in it: no saving is shown"
        yield Finding(
            name=f"{sweep.config.experiment}: {report.over} that {point} needs for {report.baseline}'s loss",
            paper=None if report.paper_saving is None else f"{report.paper_saving:.1%}",
            ours=100 * reached.share if is_finite else None,
            # None where no number is in it
            interval=(100 * low, 100 * high if math.isfinite(high) else None) if math.isfinite(low) else None,
            unit=f"% of {report.baseline}'s {report.over}",
            same_settings=report.same_settings,
            shows=None if short or reached.interval is None else high < 1,
            sentence=(
                f"For the loss of {reached.loss:.4f} nats per token that {report.baseline}'s fitted curve has at "
                f"{reached.at:.3g} {report.over}, {point} {needs}; {outcome}. The effect is said to show if the 95% "
                "interval lies below 100%."
            ),
        )


# -- tables


def _table_of_groups(sweep: Sweep, groups: Sequence[Group]) -> Table:
    rows: list[list[TableCell]] = []
    for group in groups:
        loss = mean_of(list(group.losses.values())) if group.losses else Mean(math.nan, None)
        low, high = loss.interval or (None, None)
        mean = None if math.isnan(loss.value) else loss.value
        sizes = [parameters_of(group.cell), group.cell.tokens]
        rows.append([*group.points.values(), *sizes, len(group.losses), mean, low, high])
    columns = [*sweep.config.axes, "parameters", "tokens", "seeds", "mean loss", "from", "to"]
    return Table(
        title=f"{sweep.metric} by point: mean and 95% interval over seeds (Student's t)", columns=columns, rows=rows
    )


def _table_of_fits(sweep: Sweep, fits: dict[str, Fit]) -> list[Table]:
    if not fits:
        return []
    rows: list[list[TableCell]] = []
    for point, fit in fits.items():
        bounds: Sequence[tuple[float | None, float | None]] = fit.intervals or [(None, None)] * len(fit.curve)
        for name, value, (low, high) in zip(("E", "A", "α"), fit.curve, bounds, strict=True):
            rows.append([point, name, value, low, high])
        rows.append([point, "residual", fit.residual, None, None])
    title = f"E + A·x^(−α) over {sweep.config.report.over}: least squares, 95% interval by the bootstrap of residuals"
    return [Table(title=title, columns=[sweep.config.report.compare, "of the curve", "value", "from", "to"], rows=rows)]


def _table_of_choices(sweep: Sweep, outcomes_in_play: Sequence[Outcome]) -> list[Table]:
    if sweep.config.tune is None:
        return []
    axis, seeds = sweep.config.tune.axis, sweep.config.tune_seeds
    rows: list[list[TableCell]] = [
        [*choice.points.values(), *choice.losses.values(), choice.best, choice.is_at_the_edge]
        for choice in choices(sweep, outcomes_in_play)
    ]
    others = [name for name in sweep.config.axes if name != axis]
    columns = [*others, *sweep.config.axes[axis], "best", "at the edge"]
    title = f"{sweep.metric} by {axis}, of {seeds} {'seed' if seeds == 1 else 'seeds'} that no comparison has"
    return [Table(title=title, columns=columns, rows=rows)]


def _table_of_missing(outcomes_in_play: Sequence[Outcome]) -> list[Table]:
    missing: list[list[TableCell]] = [
        [outcome.cell.name, str(outcome)] for outcome in outcomes_in_play if outcome.loss is None
    ]
    return [Table(title=MISSING, columns=["cell", "state"], rows=missing)] if missing else []


def _csv(sweep: Sweep, outcomes_in_play: Sequence[Outcome]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    numbers = ["parameters", "tokens", "flops", "state", "step", "loss"]
    writer.writerow(["cell", *sweep.config.axes, "seed", "tunes", *numbers])
    for outcome in outcomes_in_play:
        model = outcome.cell.config.model
        flops = training_flops_per_token(model) * outcome.cell.tokens
        written = "" if outcome.loss is None else repr(outcome.loss)
        named = [outcome.cell.name, *outcome.cell.points.values(), outcome.cell.seed, outcome.cell.tunes]
        writer.writerow(
            [*named, parameters_of(outcome.cell), outcome.cell.tokens, flops, outcome.state, outcome.step, written]
        )
    return text.getvalue()


def summary(folder: Path, result: Result) -> Iterator[str]:
    """Yield lines for the terminal."""
    for finding in result.findings:
        yield finding.sentence
    for table in result.tables:
        if table.title == MISSING:
            yield from (f"no loss: {name}: {state}" for name, state in table.rows)
    yield f"wrote {folder / README}"


# -- pictures


def law_picture(sweep: Sweep, groups: Sequence[Group], fits: dict[str, Fit]) -> bytes:
    """Return a PNG with logarithmic axes: a dot for each run, a line for each fitted curve."""
    compare = sweep.config.report.compare

    def draw(panels: Any) -> None:
        axes = panels[0, 0]
        for number, point in enumerate(dict.fromkeys(group.points[compare] for group in groups)):
            own = [group for group in groups if group.points[compare] == point]
            dots = [(size_of(sweep, group.cell), loss) for group in own for loss in group.losses.values()]
            colour = f"C{number}"
            if dots:
                axes.plot(*zip(*dots, strict=True), ".", color=colour, label=None if point in fits else point)
            if point in fits:
                curve, xs = fits[point].curve, [x for x, _ in dots]
                x = np.geomspace(min(xs), max(xs), 100)
                label = f"{point}: {curve.e:.3g} + {curve.a:.3g}·x^−{curve.alpha:.3g}"
                axes.plot(x, [curve.loss(each) for each in x], color=colour, label=label)
        set_logarithmic(axes.xaxis, axes.yaxis)
        axes.set(xlabel=sweep.config.report.over)
        _name(sweep, axes)

    return drawn(draw)


def points_picture(sweep: Sweep, groups: Sequence[Group]) -> bytes:
    """Return a PNG with each point's mean and 95% interval; over a field, the baseline is a line across."""
    report = sweep.config.report
    shown = [group for group in groups if group.losses]

    def draw(panels: Any) -> None:
        axes = panels[0, 0]
        for place, group in enumerate(shown):
            mean, interval = mean_of(list(group.losses.values()))
            low, high = interval or (mean, mean)
            if report.over is not None and group.points[report.compare] == report.baseline:
                axes.axhline(mean, linestyle="--", color="black", label=report.baseline)
                axes.axhspan(low, high, color="black", alpha=0.08)
                continue
            x = place if report.over is None else size_of(sweep, group.cell)
            axes.errorbar([x], [mean], yerr=[[mean - low], [high - mean]], fmt="o", color="C0", capsize=3)
            axes.plot([x] * len(group.losses), list(group.losses.values()), ".", color="C1", markersize=4)
        if report.over is None:
            names = [" ".join(group.points.values()) for group in shown]
            axes.set_xticks(range(len(shown)), names, rotation=20, ha="right", fontsize="small")
        else:
            axes.set(xlabel=report.over)
        _name(sweep, axes)

    return drawn(draw)


def _name(sweep: Sweep, axes: Any) -> None:
    axes.set(ylabel=f"{sweep.metric}, nats per token", title=sweep.config.experiment)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
