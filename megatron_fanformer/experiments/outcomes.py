"""States and results of a sweep's cells, from the runs' folders; the best points of a tuned axis; cells that are due.

An axis such as the learning rates may be tuned, so that every compared model has the point that suits it best. Runs of
the first seed choose the point, and runs of later seeds are compared: no model profits from the choice by luck.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.errors import DivergenceError, InputError
from megatron_fanformer.experiments.cells import ENDING_EARLY, LOSS, Cell, Sweep
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.metrics import PERPLEXITY_LOSS_SUFFIX, read_metrics

State = Literal["complete", "failed", "begun", "to come"]
DIVERGED = f"exit code {DivergenceError.exit_code}"  # a line of a cell's .failed
DETERMINING = ("model", "data", "optimizer", "schedule", "training")
"""The sections of a configuration that decide what a run learns, up to rounding."""
MACHINE_FIELDS = {
    *(f"training.{name}" for name in ("run_dir", "micro_batch_size", "eval_interval")),
    *ENDING_EARLY,
    "data.num_workers",
    "data.cache_path",
    "data.allow_change",  # holds for one start alone: the trainer itself refuses other data
}
"""Fields of these sections that do not decide what a run learns: its folder, when it pauses and evaluates (it always
evaluates after its last step), and how its machine reads and computes. A run fills in fields left to the machine."""
CUTTING = ("chunk_tokens", "limit_tokens", "npy_dtype", "folder")
"""Fields of `evaluation.perplexity` that decide which tokens of a set are scored, and their context."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The state of a cell, as its folder shows it."""

    cell: Cell
    state: State
    step: int
    """The last step in its metrics; 0 before the first."""
    failure: list[str]
    """The lines of the last run's error and exit code; none if it did not fail."""
    loss: float | None
    """The loss by the sweep's metric; None if the run is not complete, or lacks the metric."""
    seconds: float
    """Time of the run's training steps."""

    @property
    def diverged(self) -> bool:
        """Return whether the run diverged, which too high a learning rate causes again at every try."""
        return DIVERGED in self.failure[1:]

    def __str__(self) -> str:
        steps = f"step {self.step:,} of {self.cell.config.training.steps:,}"
        match self.state:
            case "complete" if self.loss is None:
                return "complete, but its last step has not the metric; remove its folder to train it again"
            case "complete":
                return f"complete, loss {self.loss:.4f}"
            case "failed":
                return f"failed at {steps}: {self.failure[0]}"
            case "begun":
                return steps
        return self.state


def outcome(sweep: Sweep, cell: Cell) -> Outcome:
    """Return the state and result of a cell."""
    metrics = read_metrics(cell.run) if (cell.run / run_folder.METRICS).exists() else []
    state: State = "begun" if metrics else "to come"
    loss, failure = None, list[str]()
    saved = run_folder.complete_checkpoints(cell.run)
    # A checkpoint of the last step is written after the metrics of that step.
    if saved and (run_folder.step_of(saved[-1]) or 0) >= cell.config.training.steps:
        state = "complete"
        number = sweep.config.report.average_steps if sweep.metric == LOSS else 1
        losses = [entry[sweep.metric] for entry in metrics[-number:] if entry.get(sweep.metric) is not None]
        loss = float(np.mean(losses)) if losses else None
    elif (file := cell.beside(".failed")).is_file():
        state, failure = "failed", file.read_text(encoding="utf-8").splitlines()
    return Outcome(
        cell=cell,
        state=state,
        step=metrics[-1]["step"] if metrics else 0,
        failure=failure,
        loss=loss,
        seconds=sum(entry.get("step_seconds", 0.0) for entry in metrics),
    )


def outcomes(sweep: Sweep) -> list[Outcome]:
    """Return the state and result of all cells, also of those at points of the tuned axis that are not the best.

    Raises:
        InputError: runs in the folder have other configurations than the file's; the message has a line for each run.
    """
    if problems := [problem for cell in sweep.cells if (problem := _difference(cell, sweep.metric)) is not None]:
        raise InputError("\n".join(problems))
    return [outcome(sweep, cell) for cell in sweep.cells]


def _difference(cell: Cell, metric: str) -> str | None:
    """Describe a field in which the run in a cell's folder differs from the cell; None if no field does, or no run."""
    file = cell.run / run_folder.CONFIG
    if not file.is_file():
        return None
    run = config_from_dict(run_folder.read_mapping(file), report=lambda _notice: None)
    saved, planned = (
        determining_fields(config.as_dict()) | _measuring_fields(config.as_dict(), metric)
        for config in (run, cell.config)
    )
    for name, value in planned.items():
        if saved.get(name) != value:
            return (
                f"{cell.run} has a run with {name} {saved.get(name)}, and the sweep's file makes it {value}; name "
                "another folder, or remove that one"
            )
    return None


def determining_fields(values: Mapping[str, Any], sections: Sequence[str] = DETERMINING) -> dict[str, Any]:
    """Return the fields of a configuration's sections that decide a run's losses, by their dotted names."""
    fields = {f"{section}.{name}": value for section in sections for name, value in (values.get(section) or {}).items()}
    return {name: value for name, value in fields.items() if name not in MACHINE_FIELDS}


def _measuring_fields(values: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return the fields of `evaluation` that decide how `metric`, if it is a perplexity set's loss, is measured."""
    if not metric.endswith(PERPLEXITY_LOSS_SUFFIX):
        return {}
    perplexity, name = values["evaluation"]["perplexity"], metric.split("/")[1]
    fields = {f"sets.{name}": perplexity["sets"].get(name), **{field: perplexity[field] for field in CUTTING}}
    return {f"evaluation.perplexity.{field}": value for field, value in fields.items()}


# -- the best point of a tuned axis


class Choice(NamedTuple):
    """The choice of the tuned axis's point for one combination of the other axes' points."""

    points: dict[str, str]
    """The point on each of the other axes."""
    losses: dict[str, float | None]
    """Loss by point of the tuned axis; None if the run is not complete, or diverged."""
    best: str | None
    """The point with the lowest loss; None until all these runs have ended, or if all diverged."""

    @property
    def is_at_the_edge(self) -> bool:
        """Return whether the best is the first or last point of the axis, so that a better one may lie beyond."""
        points = list(self.losses)
        return len(points) > 2 and self.best in (points[0], points[-1])


def choices(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Choice]:
    """Return the choice for each combination of points of the axes that are not tuned, in the order of the cells."""
    axis = sweep.config.tune
    tuning: dict[tuple[tuple[str, str], ...], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.cell.tunes:
            others = tuple((name, point) for name, point in outcome.cell.points.items() if name != axis)
            tuning.setdefault(others, []).append(outcome)
    made = []
    for others, runs in tuning.items():
        losses = {run.cell.points[str(axis)]: run.loss for run in runs}
        have_ended = all(run.loss is not None or run.diverged for run in runs)
        candidates = {point: loss for point, loss in losses.items() if loss is not None}
        best = min(candidates, key=candidates.__getitem__) if have_ended and candidates else None
        made.append(Choice(dict(others), losses, best))
    return made


def compared(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the cells to compare: all of them or, with a tuned axis, those at its best points."""
    if sweep.config.tune is None:
        return list(outcomes)
    best = [{**choice.points, sweep.config.tune: choice.best} for choice in choices(sweep, outcomes)]
    return [outcome for outcome in outcomes if not outcome.cell.tunes and outcome.cell.points in best]


def in_play(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the cells that take part so far: those for tuning, then those to compare, as far as points are chosen."""
    return [*(outcome for outcome in outcomes if outcome.cell.tunes), *compared(sweep, outcomes)]


def unfinished(sweep: Sweep, playing: Sequence[Outcome]) -> list[str]:
    """Return why a sweep has no result although no cell is due: cells without loss, or else choices without a best."""
    return [
        f"{outcome.cell.name} has no {sweep.metric} at its last step; remove {outcome.cell.run} to train it again"
        for outcome in playing
        if outcome.state == "complete" and outcome.loss is None
    ] or [
        f"all points of {sweep.config.tune} diverged{''.join(f', {point}' for point in choice.points.values())}; "
        "add others"
        for choice in choices(sweep, playing)
        if choice.best is None
    ]


def due(playing: Sequence[Outcome]) -> list[Cell]:
    """Return the cells in play that can run now: all that are not complete, except tuning runs that diverged."""
    return [
        outcome.cell
        for outcome in playing
        if outcome.state != "complete" and not (outcome.cell.tunes and outcome.diverged)
    ]


# -- cells that differ in seed alone


class Group(NamedTuple):
    """The cells at one point of every axis, which differ in seed alone."""

    points: dict[str, str]
    """The point on each axis."""
    cell: Cell
    """One of the cells."""
    losses: dict[int, float]
    """Losses by seed, of the cells that have a loss."""


def group_by_points(outcomes: Sequence[Outcome]) -> list[Group]:
    """Group cells that differ in seed alone, in the order of the cells."""
    groups: dict[tuple[str, ...], Group] = {}
    for outcome in outcomes:
        key = tuple(outcome.cell.points.values())
        group = groups.setdefault(key, Group(outcome.cell.points, outcome.cell, {}))
        if outcome.loss is not None:
            group.losses[outcome.cell.config.training.seed] = outcome.loss
    return list(groups.values())
