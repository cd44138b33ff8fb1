"""Reads states and results of a sweep's cells from the runs' folders; chooses a tuned axis's points; lists due cells.

An axis such as the learning rates may be tuned: then every compared model has the point that suits the model best. Runs
of the first seed choose the point, and runs of later seeds are compared: no model profits from the choice by luck.
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
DIVERGED = f"exit code {DivergenceError.exit_code}"  # the line in the .failed of a cell that diverged
DETERMINING = ("model", "data", "optimizer", "schedule", "training")
"""The sections of a configuration that decide the weights of a run, up to rounding."""
MACHINE_FIELDS = {
    *(f"training.{name}" for name in ("run_dir", "micro_batch_size", "eval_interval")),
    *ENDING_EARLY,
    "data.num_workers",
    "data.cache_path",
    "data.allow_change",  # applies to one start only: otherwise the trainer refuses changed data
}
"""Fields of these sections that do not decide a run's weights: the folder, when the run pauses and evaluates (each run
evaluates after the last step), and how the machine reads and computes. A run may fill in those left to the machine."""
CUTTING = ("chunk_tokens", "limit_tokens", "npy_dtype", "folder")
"""Fields of `evaluation.perplexity` that decide which tokens of a set are scored, and with what context."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The state of a cell, as the folder of the cell's run shows it."""

    cell: Cell
    state: State
    step: int
    """The last step in the run's metrics; 0 before the first step."""
    failure: list[str]
    """The error of the last start and, in a second line, its exit code; empty unless the state is "failed"."""
    loss: float | None
    """The loss by the sweep's metric; None if the run is not complete, or lacks the metric."""
    seconds: float
    """Sum of the times of the run's training steps."""

    @property
    def diverged(self) -> bool:
        """Return whether the run diverged, as with too high a learning rate; it would diverge again at every try."""
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
    checkpoints = run_folder.complete_checkpoints(cell.run)
    # A step's checkpoint is written after the step's metrics: if the last step has one, the metrics are complete.
    if checkpoints and (run_folder.step_of(checkpoints[-1]) or 0) >= cell.config.training.steps:
        state = "complete"
        num_steps = sweep.config.report.average_steps if sweep.metric == LOSS else 1
        losses = [entry[sweep.metric] for entry in metrics[-num_steps:] if entry.get(sweep.metric) is not None]
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
    """Return the state and result of all cells, also of cells at points of the tuned axis that are not the best.

    Raises:
        InputError: runs in the folder have other configurations than the cells; the message has a line for each run.
    """
    if problems := [problem for cell in sweep.cells if (problem := _difference(cell, sweep.metric)) is not None]:
        raise InputError("\n".join(problems))
    return [outcome(sweep, cell) for cell in sweep.cells]


def _difference(cell: Cell, metric: str) -> str | None:
    """Return a message on a field in which the run in a cell's folder differs from the cell; None if none does."""
    file = cell.run / run_folder.CONFIG
    if not file.is_file():
        return None
    run_config = config_from_dict(run_folder.read_mapping(file), report=lambda _notice: None)
    run_fields, cell_fields = (
        determining_fields(config.as_dict()) | _measuring_fields(config.as_dict(), metric)
        for config in (run_config, cell.config)
    )
    for name, value in cell_fields.items():
        if run_fields.get(name) != value:
            return (
                f"{cell.run} has a run with {name} {run_fields.get(name)}, and the sweep's file makes it {value}; name "
                "another folder, or remove that one"
            )
    return None


def determining_fields(values: Mapping[str, Any], sections: Sequence[str] = DETERMINING) -> dict[str, Any]:
    """Return the fields of a configuration's sections that decide a run's losses, by their dotted names."""
    fields = {f"{section}.{name}": value for section in sections for name, value in (values.get(section) or {}).items()}
    return {name: value for name, value in fields.items() if name not in MACHINE_FIELDS}


def _measuring_fields(values: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return the fields of `evaluation` that decide how a perplexity set's loss is measured; {} for another metric."""
    if not metric.endswith(PERPLEXITY_LOSS_SUFFIX):
        return {}
    perplexity, name = values["evaluation"]["perplexity"], metric.split("/")[1]  # metric: eval/NAME/SUFFIX
    fields = {f"sets.{name}": perplexity["sets"].get(name), **{field: perplexity[field] for field in CUTTING}}
    return {f"evaluation.perplexity.{field}": value for field, value in fields.items()}


# -- the best point of a tuned axis


class Choice(NamedTuple):
    """The choice of the tuned axis's point for one combination of the other axes' points."""

    points: dict[str, str]
    """The point on each of the other axes."""
    losses: dict[str, float | None]
    """Losses by the tuned axis's points; None for a run that is not complete, or diverged."""
    best: str | None
    """The point with the lowest loss; None until all these runs have ended, or if all diverged."""

    @property
    def is_at_the_edge(self) -> bool:
        """Return whether the best is the first or last point of the axis, so that a better one may lie beyond."""
        points = list(self.losses)
        return len(points) > 2 and self.best in (points[0], points[-1])


def choices(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Choice]:
    """Return the choice for each combination of points of the axes that are not tuned, in the order of the cells."""
    axis = str(sweep.config.tune)  # where no axis is tuned, no cell tunes, and there are no choices
    runs_by_others: dict[tuple[tuple[str, str], ...], list[Outcome]] = {}  # by the points on the other axes
    for outcome in outcomes:
        if outcome.cell.tunes:
            others = tuple((name, point) for name, point in outcome.cell.points.items() if name != axis)
            runs_by_others.setdefault(others, []).append(outcome)
    all_choices = []
    for others, runs in runs_by_others.items():
        losses = {run.cell.points[axis]: run.loss for run in runs}
        have_ended = all(run.loss is not None or run.diverged for run in runs)
        candidates = {point: loss for point, loss in losses.items() if loss is not None}
        best = min(candidates, key=candidates.__getitem__) if have_ended and candidates else None
        all_choices.append(Choice(dict(others), losses, best))
    return all_choices


def compared(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the cells to compare: all cells or, with a tuned axis, the cells of later seeds at the best points."""
    if sweep.config.tune is None:
        return list(outcomes)
    best = [{**choice.points, sweep.config.tune: choice.best} for choice in choices(sweep, outcomes)]
    return [outcome for outcome in outcomes if not outcome.cell.tunes and outcome.cell.points in best]


def in_play(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the cells that take part so far: first all tuning cells, then the cells to compare at chosen points."""
    return [*(outcome for outcome in outcomes if outcome.cell.tunes), *compared(sweep, outcomes)]


def unfinished(sweep: Sweep, playing: Sequence[Outcome]) -> list[str]:
    """Return why a sweep without due cells has no result: cells without a loss, else choices without a best point."""
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
    """Return the cells in play that can run now: cells that are not complete, except tuning cells that diverged."""
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
    """Losses by seed; a cell without a loss is left out."""


def group_by_points(outcomes: Sequence[Outcome]) -> list[Group]:
    """Group cells that differ in seed alone, in the order of the cells."""
    groups: dict[tuple[str, ...], Group] = {}
    for outcome in outcomes:
        key = tuple(outcome.cell.points.values())
        group = groups.setdefault(key, Group(outcome.cell.points, outcome.cell, {}))
        if outcome.loss is not None:
            group.losses[outcome.cell.config.training.seed] = outcome.loss
    return list(groups.values())
