"""A sweep's file and its cells, whose configurations are all checked before any of them trains.

A cell is one point of every axis and one seed. Its configuration is the base, then `changes`, then its points in the
order of the axes; its name, and that of its run's folder, is made of its points' names: `fanformer,lr1e-3,seed=1`.
docs/experiments.md has a file with every field.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from megatron_fanformer.checkpoint.run_folder import VALIDATION_LOSS
from megatron_fanformer.configuration import build, by_dotted_names, overlaid, read_values
from megatron_fanformer.errors import InputError
from megatron_fanformer.experiments.intervals import FEWEST_SEEDS, FEWEST_STEPS
from megatron_fanformer.terminal import plural
from megatron_fanformer.train.config import RunConfig, TrainingConfig, advice, config_from_dict, print_on_stderr
from megatron_fanformer.train.metrics import PERPLEXITY_LOSS_SUFFIX

Axes = dict[str, dict[str, dict[str, Any] | None]]
LOSS = "loss"  # the training loss
FITTED = ("parameters", "tokens")  # the axes of power laws
OVERRIDDEN = ("training.run_dir", "training.seed")
"""Fields that every cell sets for itself."""
ENDING_EARLY = ("training.exit_interval", "training.exit_duration_in_mins")
"""Fields by which a run ends before its last step, with exit code 0, to be started again."""
_POINT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")


@dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """An axis whose best point is taken, for each combination of the other axes' points."""

    axis: str
    """The axis to tune, such as the learning rates."""
    seeds: int = 1
    """Runs at each of its points, by whose mean loss the best one is chosen. They are of the first seeds; the
    comparisons are of the seeds after them, which the choice has not seen."""


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """The comparisons that a sweep's report makes."""

    compare: str
    """The axis whose points are compared with one another."""
    baseline: str
    """The point of it that the others are compared with."""
    other_baselines: list[str] = field(default_factory=list)
    """Further points that the others are also compared with."""
    primary: list[list[str]] = field(default_factory=list)
    """Pairs [POINT, BASELINE], stated before the runs: POINT's loss is lower. Only these can show, corrected for their
    number (Holm); all other comparisons are exploratory. Without any, a sweep's single comparison is primary."""
    by: list[str] = field(default_factory=list)
    """Axes at whose points comparisons are made apart, such as the optimizer; over other axes they are averaged."""
    over: str | None = None
    """`parameters` (outside the embedding and the head) or `tokens`: a power law is fitted over them; a field, such as
    `model.fan.p_ratio`: the loss is drawn over it; null: the points are listed."""
    metric: str | None = None
    """The metric of the last step that is the cell's loss, such as `eval/stdlib/CrossEntropyLoss`; `loss`: the training
    loss; null: the validation loss, of the only set."""
    average_steps: int = 1
    """With the training loss: number of last steps to average it over."""
    fewest_seeds: int = FEWEST_SEEDS
    """The fewest seeds with which a comparison can show anything."""
    fewest_steps: int = FEWEST_STEPS
    """The fewest steps with which a comparison can show anything."""
    paper: dict[str, float] = field(default_factory=dict)
    """The paper's losses by the points of `compare`, in nats per token."""
    paper_saving: float | None = None
    """With a power law: the share of the baseline's parameters, or tokens, that the paper's model needs for its
    loss."""
    same_settings: bool = False
    """True if model, data and length are the paper's."""

    def problems(self) -> Iterator[str]:
        """Yield the rules of single fields that this section breaks."""
        for name, least in (("average_steps", 1), ("fewest_seeds", 2), ("fewest_steps", 1)):
            if getattr(self, name) < least:
                yield f"report.{name} is {getattr(self, name)}; it must be at least {least}"
        if self.average_steps > 1 and self.metric != LOSS:
            yield "report.average_steps is set without report.metric loss; other metrics are taken once, at the end"
        if self.paper_saving is not None and self.over not in FITTED:
            yield f"report.paper_saving is set, and nothing is fitted; set report.over to {' or '.join(FITTED)}"
        for name in ("by", "other_baselines", "primary"):
            if getattr(self, name) and self.over in FITTED:
                yield f"report.{name} is set, and a power law is fitted over {self.over}; leave one of them out"
        for pair in self.primary:
            if len(pair) != 2 or pair[0] == pair[1]:
                yield f"report.primary has {pair}, which is not a pair of two points; write [POINT, BASELINE]"


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """A sweep's file."""

    experiment: str
    """The experiment's name in the report."""
    folder: str
    """The sweep's folder, which holds the runs' folders."""
    base: str
    """The configuration file that all cells start from, beside the sweep's file unless absolute."""
    changes: Any = field(default_factory=dict)
    """Fields that all cells change, by their dotted names."""
    axes: Any
    """Axes by name; each maps its points' names to the fields that the point changes."""
    tune: TuneConfig | None = None
    """An axis whose best point is chosen first; null: all points are compared."""
    seeds: int = 1
    """Cells at every point, of the seeds `training.seed`, `training.seed` + 1 and so on, after those of `tune`."""
    limit: int = 200
    """The most cells that the axes and seeds may make."""
    report: ReportConfig
    """The comparisons of the report."""

    def problems(self) -> list[str]:
        """Return the rules that the file breaks by itself, one line each."""
        counts = {"seeds": self.seeds, "limit": self.limit, "tune.seeds": self.tune_seeds if self.tune else 1}
        problems = [f"{name} is {value}; it must be at least 1" for name, value in counts.items() if value < 1]
        try:
            axes, changed = msgspec.convert(self.axes, Axes), {"changes": self.changes}
            msgspec.convert(self.changes, dict[str, Any] | None)
        except msgspec.ValidationError as error:
            form = "axes: {AXIS: {POINT: {section.field: value}}} and changes: {section.field: value}"
            return [*problems, f"axes or changes are not as they must be ({error}); write {form}"]
        for axis, points in axes.items():
            if not points:
                problems.append(f"axes.{axis} has no point; write {{POINT: {{section.field: value}}}}")
            for point, changes in points.items():
                changed[f"axes.{axis}.{point}"] = changes
                if not _POINT_NAME.fullmatch(point):
                    problems.append(
                        f"axes.{axis} has the point {point!r}, and folders are named by points; use letters, digits "
                        "and . _ + = -"
                    )
        for where, changes in changed.items():
            for name in changes or ():
                if "." not in name:
                    problems.append(f"{where} has {name!r}, no field by its dotted name; write section.field")
                elif name in OVERRIDDEN:
                    problems.append(f"{where} has {name}, which the sweep sets for each cell; leave it out")
        problems += self._axis_problems()
        if not problems and self.num_cells > self.limit:
            problems.append(f"the axes and seeds make {self.num_cells:,} cells, more than limit {self.limit}; raise it")
        return [*problems, *self.report.problems()]

    def _axis_problems(self) -> Iterator[str]:
        """Yield names in fields of no axis, or of no point of the compared one."""
        report = self.report
        named = [("report.compare", report.compare), *(("report.by", axis) for axis in report.by)]
        named += [("tune.axis", self.tune.axis)] if self.tune else []
        for name, axis in named:
            if axis not in self.axes:
                yield f"{name} is {axis}, no axis; the axes are {', '.join(self.axes)}"
        if len({axis for _, axis in named}) < len(named):
            yield "report.compare, report.by and tune.axis name an axis twice; an axis has one use"
        points = self.axes.get(report.compare, ())
        in_fields = {
            "baseline": [report.baseline],
            "other_baselines": report.other_baselines,
            "primary": itertools.chain(*report.primary),
            "paper": report.paper,
        }
        for name, point in ((name, point) for name, named_points in in_fields.items() for point in named_points):
            if points and point not in points:
                known = ", ".join(points)
                yield f"report.{name} has {point!r}, no point of {report.compare}; its points are {known}"

    @property
    def tune_seeds(self) -> int:
        """Return how many of the first seeds are for the choice of a point."""
        return self.tune.seeds if self.tune else 0

    @property
    def num_cells(self) -> int:
        """Return how many runs the sweep has."""
        points = math.prod(len(points) for points in self.axes.values())
        compared = points // len(self.axes[self.tune.axis]) if self.tune else points
        return points * self.tune_seeds + compared * self.seeds


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a sweep."""

    name: str
    points: dict[str, str]
    """Its point on each axis."""
    tunes: bool
    """True if it serves to choose the best point of `tune`, False if it is compared."""
    config: RunConfig

    @property
    def run(self) -> Path:
        """Return its run's folder."""
        return Path(self.config.training.run_dir)

    @property
    def file(self) -> Path:
        """Return its configuration file, beside its run's folder."""
        return self.run.with_name(f"{self.name}.yaml")

    @property
    def log(self) -> Path:
        """Return the file of its runs' output."""
        return self.run.with_name(f"{self.name}.log")

    @property
    def failure(self) -> Path:
        """Return the file of its last run's error, which is there if that failed."""
        return self.run.with_name(f"{self.name}.failed")

    @property
    def tokens(self) -> int:
        """Return the tokens that it is trained on."""
        training = self.config.training
        return training.steps * training.global_batch_size * self.config.model.seq_length

    @property
    def parameters(self) -> int:
        """Return the parameters outside the embedding and the head, as the paper counts its Transformers' (268M at
        300M).
        """
        model = self.config.model
        tables = 1 + model.untie_embeddings_and_output_weights
        return model.num_parameters - tables * model.padded_vocab_size * model.hidden_size

    def field(self, name: str) -> Any:
        """Return the value of a field by its dotted name."""
        value: Any = self.config
        for part in name.split("."):
            value = getattr(value, part)
        return value


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep's file, read and checked."""

    file: Path
    config: SweepConfig
    cells: list[Cell]
    """All cells that may run; with a tuned axis, the comparisons use those at its best points."""

    @property
    def folder(self) -> Path:
        """Return the sweep's folder."""
        return Path(self.config.folder)

    @property
    def metric(self) -> str:
        """Return the name of the cells' loss in the metrics of a run."""
        if self.config.report.metric is not None:
            return self.config.report.metric
        (name,) = self.cells[0].config.data.validation_sets
        return f"{VALIDATION_LOSS}/{name}"

    def size_of(self, cell: Cell) -> float:
        """Return a cell's place on the axis that the losses are drawn over."""
        over = self.config.report.over
        if over is None:
            return 0.0
        return float(getattr(cell, over) if over in FITTED else cell.field(over))


def read_sweep(file: Path, *, needs_data: bool) -> Sweep:
    """Read a sweep's file, and check every cell's configuration as `train` would.

    Args:
        needs_data: whether the token files must be there.

    Raises:
        InputError: the file or cells are wrong; every problem, one line each.
    """
    values = read_values(file)
    return sweep_of(file, values, lambda config: read_values(file.parent / config.base), needs_data=needs_data)


def sweep_of(
    file: Path, values: dict[str, Any], read_base: Callable[[SweepConfig], dict[str, Any]], *, needs_data: bool
) -> Sweep:
    """Return the sweep of a file with these values.

    Args:
        read_base: returns the values of the base.

    Raises:
        InputError: as `read_sweep`.
    """
    config = build(values, SweepConfig)
    if own_problems := config.problems():
        raise InputError("\n".join(own_problems))
    base = read_base(config)
    first_seed = by_dotted_names(overlaid(base, config.changes or {})).get("training.seed", TrainingConfig.seed)
    if type(first_seed) is not int:
        raise InputError(f"training.seed is {first_seed!r}; it must be an integer, the first of the sweep's seeds")
    cells: list[Cell] = []
    cells_of_problem: dict[str, list[str]] = {}
    notices: dict[str, None] = {}  # the same ones in every cell
    seeds = range(config.tune_seeds + config.seeds)
    names = []
    for *chosen, number in itertools.product(*config.axes.values(), seeds):
        points = dict(zip(config.axes, chosen, strict=True))
        changes = dict(config.changes or {})
        for axis, point in points.items():
            changes |= config.axes[axis][point] or {}
        seed = first_seed + number
        names.append(name := ",".join([*chosen, f"seed={seed}"]))
        changes |= {"training.run_dir": str(Path(config.folder, name)), "training.seed": seed}
        try:
            run = config_from_dict(overlaid(base, changes), report=lambda notice: notices.update({notice: None}))
            problems = _run_problems(run, needs_data=needs_data)
        except InputError as error:
            problems = str(error).splitlines()
        else:
            cells.append(Cell(name=name, points=points, tunes=number < config.tune_seeds, config=run))
        for problem in problems:
            cells_of_problem.setdefault(problem, []).append(name)
    if cells_of_problem:
        lines = []
        for problem, of_these in cells_of_problem.items():
            more = f" and {len(of_these) - 1} more" if len(of_these) > 1 else ""
            where = "in every cell" if of_these == names else f"cell {of_these[0]}{more}"
            lines.append(f"{where}: {problem}")
        raise InputError("\n".join(lines))
    for notice in notices:
        print_on_stderr(notice)
    sweep = Sweep(file=file, config=config, cells=cells)
    if report_problem := _report_problem(sweep):
        raise InputError(report_problem)
    return sweep


def _run_problems(config: RunConfig, *, needs_data: bool) -> list[str]:
    if problems := config.section_problems(leaving=() if needs_data else ("data",)):
        return problems
    if config.training.epochs is not None:
        return [
            f"training.epochs is {config.training.epochs:g}, but a sweep's cells state their steps; set train_iters"
        ]
    return config.joint_problems(config.parallel.resolve_data_parallel_size(None))


def metrics_of(config: RunConfig) -> list[str]:
    """Return the names of the losses that a run measures, but those of groups of perplexity sets: validation first."""
    validation = [f"{VALIDATION_LOSS}/{name}" for name in config.data.validation_sets]
    return [*validation, *(f"eval/{name}{PERPLEXITY_LOSS_SUFFIX}" for name in config.evaluation.perplexity.sets), LOSS]


def _report_problem(sweep: Sweep) -> str | None:
    """Return the rule that the report's fields break in view of the cells, if there is one."""
    report, config = sweep.config.report, sweep.cells[0].config
    sets, known = config.data.validation_sets, metrics_of(config)
    has_groups = config.evaluation.perplexity.groups and (report.metric or "").endswith(PERPLEXITY_LOSS_SUFFIX)
    if report.metric is None and len(sets) != 1:
        number = plural(len(sets), "validation set")
        return f"report.metric is not set, and the runs have {number}; name one of {', '.join(known)}"
    if report.metric is not None and report.metric not in known and not has_groups:
        return f"report.metric is {report.metric}, no loss that the runs measure; they have {', '.join(known)}"
    for cell in sweep.cells if report.over not in (None, *FITTED) else ():
        try:
            sweep.size_of(cell)
        except AttributeError:
            hint = advice(str(report.over)) or "name one"
            return f"report.over is {report.over}, neither parameters, tokens nor a field; {hint}"
        except (TypeError, ValueError):
            return f"report.over is {report.over}, no number in {cell.name}; name a field that is one"
    return None
