"""A sweep's losses as a picture: over parameters or tokens with their power laws, over a field, or side by side."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_fanformer.experiments.fits import Fit
from megatron_fanformer.experiments.intervals import mean_of
from megatron_fanformer.experiments.sweeps.file import Sweep
from megatron_fanformer.experiments.sweeps.groups import Group, size_of
from megatron_fanformer.pictures import drawn, set_logarithmic


def law_picture(sweep: Sweep, groups: Sequence[Group], fits: dict[str, Fit]) -> bytes:
    """A PNG with logarithmic axes: a dot for each run, a line for each fitted curve."""
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
    """A PNG with each point's mean and 95% interval; over a field, the baseline is a line across."""
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
