"""Reads a sweep's file, and checks the configurations of all cells before any cell trains.

A cell is one run, at one point of every axis and with one seed. The cell's configuration is the base configuration,
changed first by `changes`, then by the cell's points in the order of the axes. Cell and folder are named by points and
seed, as in `fanformer,lr1e-3,seed=1`. docs/experiments.md has a file with every field.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint.run_folder import VALIDATION_LOSS
from megatron_fanformer.configuration import build, overlay, read_values
from megatron_fanformer.errors import InputError, did_you_mean
from megatron_fanformer.terminal import plural
from megatron_fanformer.train.config import RunConfig, TrainingConfig, advice, config_from_dict, print_on_stderr
from megatron_fanformer.train.metrics import PERPLEXITY_LOSS_SUFFIX

LOSS = "loss"  # the metric of the training loss
FITTED = ("parameters", "tokens")  # values of `report.over` for which power laws are fitted
OVERRIDDEN = ("training.run_dir", "training.seed")
"""Fields that the sweep sets for each cell."""
ENDING_EARLY = ("training.exit_interval", "training.exit_duration_in_mins")
"""Fields that make a run end before its last step, with exit code 0; the next start of the sweep resumes the run."""
_POINT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """The comparisons that a sweep's report makes."""

    compare: str
    """The axis whose points are compared with one another."""
    baseline: str
    """The point of `compare` with which the axis's other points are compared."""
    primary: list[tuple[str, str]] = field(default_factory=list)
    """Pairs [POINT, BASELINE], stated before the runs: POINT should have the lower loss. Only they can show an effect,
    corrected for their number (Holm); others are exploratory. Without any, a sweep's only comparison is primary."""
    by: list[str] = field(default_factory=list)
    """Axes, such as the optimizer, each point of which gets a comparison; over all other axes, losses are averaged."""
    over: str | None = None
    """The x axis: `parameters` (without embedding and head) or `tokens`, over which a power law is fitted; or a field,
    such as `model.fan.p_ratio`, over which losses are drawn; null: points are drawn side by side."""
    metric: str | None = None
    """The metric whose value at the last step is the cell's loss, such as `eval/stdlib/CrossEntropyLoss`; `loss`: the
    training loss; null: the loss on the only validation set."""
    average_steps: int = 1
    """With the training loss as metric: the number of last steps over which it is averaged."""
    paper: dict[str, float] = field(default_factory=dict)
    """The paper's losses by the points of `compare`, in nats per token."""
    paper_saving: float | None = None
    """With a power law: the share of the baseline's parameters, or tokens, with which the paper's model has the
    baseline's loss."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """A sweep's file."""

    experiment: str
    """The experiment's name in the report."""
    folder: str
    """The sweep's folder, which holds the runs' folders."""
    base: str
    """The configuration file that all cells start from; a relative path starts from the folder of the sweep's file."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Fields that all cells change, by their dotted names."""
    axes: dict[str, dict[str, dict[str, Any]]]
    """Axes by name; each maps its points' names to the fields that the point changes."""
    tune: str | None = None
    """An axis to tune, such as the learning rates. Runs of the first seed choose its best point for each combination of
    the other axes' points; the comparisons use the later seeds, which the choice has not seen."""
    seeds: int = 1
    """Number of seeds at every compared point, from `training.seed` on; with `tune`, from `training.seed` + 1 on."""
    report: ReportConfig
    """The comparisons of the report."""

    def problems(self) -> Iterator[str]:
        """Yield the problems of the file itself, apart from those of its cells' configurations."""
        report = self.report
        for name, value in (("seeds", self.seeds), ("report.average_steps", report.average_steps)):
            if value < 1:
                yield f"{name} is {value}; it must be at least 1"
        changes_by_place = {"changes": self.changes}
        for axis, points in self.axes.items():
            if not points:
                yield f"axes.{axis} has no point; write {{POINT: {{section.field: value}}}}"
            for point, changes in points.items():
                changes_by_place[f"axes.{axis}.{point}"] = changes
                if not _POINT_NAME.fullmatch(point):
                    yield (
                        f"axes.{axis} has the point {point!r}, and folders are named by points; use letters, digits "
                        "and . _ + = -"
                    )
        for place, changes in changes_by_place.items():
            for name in changes:
                if "." not in name:
                    yield f"{place} has {name!r}, no field by its dotted name; write section.field"
                elif name in OVERRIDDEN:
                    yield f"{place} has {name}, which the sweep sets for each cell; leave it out"
        used_axes = [report.compare, *report.by, *([self.tune] if self.tune else [])]
        for axis in used_axes:
            if axis not in self.axes:
                yield f"{axis} is no axis; the axes are {', '.join(self.axes)}"
        if len({*used_axes}) < len(used_axes):
            yield "report.compare, report.by and tune name an axis twice; an axis has one use"
        known = self.axes.get(report.compare, {})  # empty if the axis is unknown, which is yielded above
        for point in dict.fromkeys([report.baseline, *itertools.chain(*report.primary), *report.paper]):
            if known and point not in known:
                yield f"report has {point!r}, no point of {report.compare}; its points are {', '.join(known)}"
        for name in ("by", "primary"):
            if getattr(report, name) and report.over in FITTED:
                yield f"report.{name} is set, and a power law is fitted over {report.over}; leave one of them out"

    @property
    def num_cells(self) -> int:
        """Return the number of runs; with `tune`, every point runs with the first seed, the best with `seeds` more."""
        combinations = math.prod(len(points) for points in self.axes.values())
        if not self.tune:
            return combinations * self.seeds
        return combinations + combinations // len(self.axes[self.tune]) * self.seeds


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a sweep."""

    name: str
    points: dict[str, str]
    """The cell's point on each axis."""
    tunes: bool
    """True if the cell serves to choose the best point of `tune`, False if the cell is compared."""
    config: RunConfig

    @property
    def run(self) -> Path:
        """Return the folder of the cell's run."""
        return Path(self.config.training.run_dir)

    def beside(self, suffix: str) -> Path:
        """Return the path of the cell's file with this suffix, beside the run's folder.

        `.yaml` holds the cell's configuration, `.log` its runs' output, `.failed` the error if the last run failed.
        """
        return self.run.with_name(self.name + suffix)

    @property
    def tokens(self) -> int:
        """Return the number of tokens on which the cell is trained."""
        training = self.config.training
        return training.steps * training.global_batch_size * self.config.model.seq_length

    @property
    def parameters(self) -> int:
        """Return the number of parameters without embedding and head, as the paper counts (268M for its 300M model)."""
        model = self.config.model
        tables = 1 + model.untie_embeddings_and_output_weights  # the embedding and, unless they are one, the head
        return model.num_parameters - tables * model.padded_vocab_size * model.hidden_size

    def field(self, name: str) -> Any:
        """Return the value of a field by its dotted name."""
        return functools.reduce(getattr, name.split("."), self.config)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep's file, read and checked."""

    file: Path
    config: SweepConfig
    cells: list[Cell]
    """All cells that may run. With a tuned axis, only cells at the best points are compared."""

    @property
    def folder(self) -> Path:
        """Return the sweep's folder."""
        return Path(self.config.folder)

    @property
    def metric(self) -> str:
        """Return the name of the compared loss in the metrics of a run."""
        if self.config.report.metric is not None:
            return self.config.report.metric
        (name,) = self.cells[0].config.data.validation_sets  # a single one: `read_sweep` checks it
        return f"{VALIDATION_LOSS}/{name}"

    def size_of(self, cell: Cell) -> float:
        """Return a cell's place on the x axis, the value of `report.over`; 0 if `report.over` is null."""
        over = self.config.report.over
        if over is None:
            return 0.0
        return float(getattr(cell, over) if over in FITTED else cell.field(over))


def read_sweep(file: Path, *, needs_data: bool) -> Sweep:
    """Read a sweep's file, and check every cell's configuration as `train` would.

    Args:
        needs_data: whether the token files must exist.

    Raises:
        InputError: the file or a cell is wrong; the message has a line for each problem.
    """
    config = build(read_values(file), SweepConfig)
    if file_problems := [*config.problems()]:
        raise InputError("\n".join(file_problems))
    base = read_values(file.parent / config.base)
    first_seed = (base.get("training") or {}).get("seed", TrainingConfig.seed)
    if type(first_seed) is not int:
        raise InputError(f"training.seed is {first_seed!r}; it must be an integer, the first of the sweep's seeds")
    cells: list[Cell] = []
    cells_by_problem: dict[str, list[str]] = {}
    names = []
    notify = functools.cache(print_on_stderr)  # prints a notice once, though every cell gives it
    seed_numbers = range(config.seeds + (1 if config.tune else 0))  # with `tune`, number 0 chooses the best points
    for point_names, number in itertools.product(itertools.product(*config.axes.values()), seed_numbers):
        points = dict(zip(config.axes, point_names, strict=True))
        seed = first_seed + number
        names.append(name := ",".join([*point_names, f"seed={seed}"]))
        changes = dict(config.changes)
        for axis, point in points.items():
            changes |= config.axes[axis][point]
        changes |= {"training.run_dir": str(Path(config.folder, name)), "training.seed": seed}
        try:
            run = config_from_dict(overlay(base, changes), report=notify)
            problems = _run_problems(run, needs_data=needs_data)
        except InputError as error:
            problems = str(error).splitlines()
        else:
            cells.append(Cell(name=name, points=points, tunes=config.tune is not None and number == 0, config=run))
        for problem in problems:
            cells_by_problem.setdefault(problem, []).append(name)
    lines = []
    for problem, cell_names in cells_by_problem.items():
        more = f" and {len(cell_names) - 1} more" if len(cell_names) > 1 else ""
        where = "in every cell" if cell_names == names else f"cell {cell_names[0]}{more}"
        lines.append(f"{where}: {problem}")
    sweep = Sweep(file=file, config=config, cells=cells)
    if lines := lines or _report_problems(sweep):  # the report is checked only if all cells are valid
        raise InputError("\n".join(lines))
    return sweep


def _run_problems(config: RunConfig, *, needs_data: bool) -> list[str]:
    """Return the problems of a cell's configuration: those that `train` would report, and epochs in place of steps."""
    if problems := config.section_problems(exclude=() if needs_data else ("data",)):
        return problems
    if config.training.epochs is not None:
        return [
            f"training.epochs is {config.training.epochs:g}, but a sweep's cells state their steps; set train_iters"
        ]
    return config.joint_problems(config.parallel.resolve_data_parallel_size(None))  # None: before ranks are launched


def _report_problems(sweep: Sweep) -> list[str]:
    """Return the problems of the report's fields for these cells, such as a metric that their runs do not have."""
    report, config = sweep.config.report, sweep.cells[0].config
    sets, perplexity_sets = config.data.validation_sets, config.evaluation.perplexity.paths
    known = [f"{VALIDATION_LOSS}/{name}" for name in sets]
    known += [*(f"eval/{name}{PERPLEXITY_LOSS_SUFFIX}" for name in perplexity_sets), LOSS]
    if report.metric is None and len(sets) != 1:
        number = plural(len(sets), "validation set")
        return [f"report.metric is not set, and the runs have {number}; name one of {', '.join(known)}"]
    if report.metric is not None and report.metric not in known:
        hint = did_you_mean(report.metric, known, f"they have {', '.join(known)}")
        return [f"report.metric is {report.metric}, no loss that the runs measure; {hint}"]
    try:
        for cell in sweep.cells:
            sweep.size_of(cell)  # raises if the field does not exist, or is not a number
    except (AttributeError, TypeError, ValueError):
        hint = advice(str(report.over)) or "name one"
        return [f"report.over is {report.over}, neither parameters, tokens nor a field that is a number; {hint}"]
    return []
