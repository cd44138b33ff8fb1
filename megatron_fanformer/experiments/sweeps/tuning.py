"""The best point of a sweep's tuned axis, such as its learning rates, for each combination of the other axes' points.

Every arm of a comparison is to have the rate that suits it: one for all favors the arm that it suits best. The choice
is by runs of the first seeds, and the comparison by the seeds after them: no arm is flattered by its own choice.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron_fanformer.experiments.sweeps.cells import Outcome
from megatron_fanformer.experiments.sweeps.file import Cell, Sweep


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


def choices(sweep: Sweep, found: Sequence[Outcome]) -> list[Choice]:
    """Return the choice at each point of the axes that are not tuned, in the order of the cells."""
    if sweep.config.tune is None:
        return []
    axis = sweep.config.tune.axis
    ended: dict[tuple[tuple[str, str], ...], dict[str, list[Outcome]]] = {}
    for each in found:
        if each.cell.tunes:
            others = tuple((name, point) for name, point in each.cell.points.items() if name != axis)
            ended.setdefault(others, {}).setdefault(each.cell.points[axis], []).append(each)
    return [Choice(dict(others), *_best(by_point)) for others, by_point in ended.items()]


def _best(by_point: dict[str, list[Outcome]]) -> tuple[dict[str, float | None], str | None]:
    losses: dict[str, float | None] = {}
    have_ended = True
    for point, of_point in by_point.items():
        known = [each.loss for each in of_point if each.loss is not None]
        losses[point] = float(np.mean(known)) if len(known) == len(of_point) else None
        have_ended &= all(each.loss is not None or each.diverged for each in of_point)
    candidates = {point: loss for point, loss in losses.items() if loss is not None}
    return losses, min(candidates, key=candidates.__getitem__) if have_ended and candidates else None


def compared(sweep: Sweep, found: Sequence[Outcome]) -> list[Outcome]:
    """Return the cells that the comparisons are of: all, or those at the best points of the tuned axis."""
    if sweep.config.tune is None:
        return list(found)
    best = [{**choice.points, sweep.config.tune.axis: choice.best} for choice in choices(sweep, found)]
    return [each for each in found if not each.cell.tunes and each.cell.points in best]


def in_play(sweep: Sweep, found: Sequence[Outcome]) -> list[Outcome]:
    """Return the cells that have run or are to run, as far as the choices are made: those for tuning come first."""
    return [*(each for each in found if each.cell.tunes), *compared(sweep, found)]


def unfinished(sweep: Sweep, playing: Sequence[Outcome]) -> list[str]:
    """Return what keeps a sweep of which nothing is due from its result, one line each."""
    found = [
        f"{each.cell.name} has no {sweep.metric} at its last step; remove {each.cell.run} to train it again"
        for each in playing
        if each.state == "complete" and each.loss is None
    ]
    if sweep.config.tune is not None and not found:
        axis = sweep.config.tune.axis
        found = [
            f"all points of {axis} diverged{''.join(f', {point}' for point in choice.points.values())}; add others"
            for choice in choices(sweep, playing)
            if choice.best is None
        ]
    return found


def due(playing: Sequence[Outcome]) -> list[Cell]:
    """Return what, of the cells in play, can run now and is not complete; a choice that is made then brings more."""
    # A tuning run that diverged would again: it has said what it was to say.
    return [each.cell for each in playing if each.state != "complete" and not (each.cell.tunes and each.diverged)]
