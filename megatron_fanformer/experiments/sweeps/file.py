"""A sweep's file: a base configuration, axes of named points, seeds, and what the report compares.

    experiment: scaling in parameters
    folder: runs/sweeps/scaling
    base: laptop.yaml                       # beside this file
    changes: {training.train_iters: 300}    # of every cell
    axes:
      architecture:
        transformer: {model.fan.placement: none}
        fanformer: {}
      size:
        d64: {model.hidden_size: 64, model.num_attention_heads: 4}
        d96: {model.hidden_size: 96, model.num_attention_heads: 6}
    seeds: 3
    report: {compare: architecture, baseline: transformer, over: parameters}

A cell is one point of every axis and one seed. Its configuration is the base, then `changes`, then its points in the
order of the axes; its name, and that of its run's folder, is made of its points' names: `fanformer,d64,seed=1`.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint.store import VALIDATION_LOSS
from megatron_fanformer.configuration import build, nested, overlaid, read_values
from megatron_fanformer.errors import InputError
from megatron_fanformer.training.config import RunConfig, TrainingConfig, advice, config_from_dict, print_on_stderr

BETWEEN = ","  # the names of a cell's points
_POINT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+=-]*")
LOSS = "loss"  # the training loss
CROSS_ENTROPY = "CrossEntropyLoss"  # ends the name of a perplexity set's loss
FITTED = ("parameters", "tokens")  # what a power law is fitted over
OVERRIDDEN = ("training.run_dir", "training.seed")
"""Fields that each cell has its own of."""


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """The comparison that a sweep's report makes."""

    compare: str
    """The axis whose points are compared with one another."""
    baseline: str
    """The point of it that the others are compared with."""
    over: str | None = None
    """`parameters` (outside the embedding and the head) or `tokens`: a power law is fitted over them; a field, such as
    `model.fan.p_ratio`: the loss is drawn over it; null: the points are listed."""
    metric: str | None = None
    """The metric of the last step that is the cell's loss, such as `eval/stdlib/CrossEntropyLoss`; `loss`: the training
    loss; null: the validation loss, of the only set."""
    average_steps: int = 1
    """With the training loss: how many of the last steps it is the mean of."""
    paper: Any = field(default_factory=dict)
    """The paper's losses by the points of `compare`, in nats per token; points without one are expected to be below the
    baseline."""
    paper_saving: float | None = None
    """With a power law: the share of the baseline's parameters, or tokens, that the paper's model needs for its
    loss."""
    same_settings: bool = False
    """Whether model, data and length are the paper's."""

    def problems(self) -> list[str]:
        """Rules of single fields that this section breaks, one line each."""
        found = []
        if self.average_steps < 1:
            found.append(f"report.average_steps is {self.average_steps}; it must be at least 1")
        elif self.average_steps > 1 and self.metric != LOSS:
            found.append(
                "report.average_steps is set without report.metric loss; other metrics are taken once, at the end"
            )
        if not isinstance(self.paper, Mapping) or any(type(value) not in (int, float) for value in self.paper.values()):
            found.append("report.paper is not a mapping to numbers; write {POINT: loss}")
        if self.paper_saving is not None and self.over not in FITTED:
            found.append(f"report.paper_saving is set, and nothing is fitted; set report.over to {' or '.join(FITTED)}")
        return found


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """A sweep's file."""

    experiment: str
    """What the report calls it."""
    folder: str
    """The sweep's folder, which has those of the runs."""
    base: str
    """The configuration file that all cells start from, beside the sweep's file unless absolute."""
    changes: Any = field(default_factory=dict)
    """Fields that all cells change, by their dotted names."""
    axes: Any
    """By an axis's name its points, by a point's name the fields that it changes."""
    seeds: int = 1
    """Cells at every point, of the seeds `training.seed`, `training.seed` + 1 and so on."""
    limit: int = 200
    """The most cells that the axes and seeds may make."""
    report: ReportConfig
    """What is compared."""

    def problems(self) -> list[str]:
        """List what is wrong with the file by itself, one line each."""
        found = [
            f"{name} is {value}; it must be at least 1"
            for name, value in (("seeds", self.seeds), ("limit", self.limit))
            if value < 1
        ]
        if not isinstance(self.axes, Mapping) or not self.axes:
            return [*found, "axes is not a mapping; write {AXIS: {POINT: {section.field: value}}}"]
        for axis, points in self.axes.items():
            if not isinstance(points, Mapping) or not points:
                found.append(f"axes.{axis} is not a mapping; write {{POINT: {{section.field: value}}}}")
                continue
            for name, changes in points.items():
                if not isinstance(name, str) or not _POINT_NAME.fullmatch(name):
                    found.append(
                        f"axes.{axis} has the point {name!r}, and folders are named by points; use text of letters, "
                        "digits and . _ + = -, in quotes if it is a number"
                    )
                found += _change_problems(f"axes.{axis}.{name}", changes)
        found += _change_problems("changes", self.changes)
        points = self.axes.get(self.report.compare)
        if points is None:
            found.append(
                f"report.compare is {self.report.compare}, no axis; the axes are {', '.join(map(str, self.axes))}"
            )
        elif isinstance(points, Mapping) and self.report.baseline not in points:
            found.append(
                f"report.baseline is {self.report.baseline}, no point of {self.report.compare}; its points are "
                f"{', '.join(map(str, points))}"
            )
        elif isinstance(points, Mapping) and isinstance(self.report.paper, Mapping):
            found += [
                f"report.paper has {name!r}, no point of {self.report.compare}; its points are "
                f"{', '.join(map(str, points))}"
                for name in self.report.paper
                if name not in points
            ]
        if not found and self.num_cells > self.limit:
            found.append(f"the axes and seeds make {self.num_cells:,} cells, more than limit {self.limit}; raise it")
        return [*found, *self.report.problems()]

    @property
    def num_cells(self) -> int:
        """Return the product of all axes' points and the seeds."""
        return math.prod(len(points) for points in self.axes.values()) * self.seeds


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a sweep."""

    name: str
    points: dict[str, str]
    """Its point of each axis."""
    config: RunConfig

    @property
    def seed(self) -> int:
        """Return the seed of the initial weights and the order of samples."""
        return self.config.training.seed

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
        """Return the file of what its runs have printed."""
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

    def field(self, name: str) -> Any:
        """Return the value of a field by its dotted name."""
        found: Any = self.config
        for part in name.split("."):
            found = getattr(found, part)
        return found


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep's file, read and checked."""

    file: Path
    config: SweepConfig
    cells: list[Cell]

    @property
    def folder(self) -> Path:
        """Return the sweep's folder."""
        return Path(self.config.folder)

    @property
    def metric(self) -> str:
        """Return the name of the cells' loss in the metrics of a run."""
        if self.config.report.metric is not None:
            return self.config.report.metric
        (name,) = self.cells[0].config.data.valid_data
        return f"{VALIDATION_LOSS}/{name}"


def read_sweep(file: Path, *, needs_data: bool) -> Sweep:
    """Read a sweep's file, and check every cell's configuration as `train` would.

    Args:
        needs_data: whether the token files must be there.

    Raises:
        InputError: everything that is wrong with it, one line each.
    """
    config = build(read_values(file), SweepConfig)
    if found := config.problems():
        raise InputError("\n".join(found))
    base_file = file.parent / config.base
    base = read_values(base_file)
    cells: list[Cell] = []
    problems: dict[str, list[str]] = {}
    notices: dict[str, None] = {}  # the same ones in every cell
    for name, points, values in _cells(config, base):
        try:
            of_cell = config_from_dict(values, report=lambda notice: notices.update({notice: None}))
            cell = Cell(name=name, points=points, config=of_cell)
            found = _run_problems(cell.config, needs_data=needs_data)
        except InputError as error:
            found = str(error).splitlines()
        else:
            cells.append(cell)
        for problem in found:
            problems.setdefault(problem, []).append(name)
    if problems:
        raise InputError("\n".join(_in_cells(problem, names, config.num_cells) for problem, names in problems.items()))
    for notice in notices:
        print_on_stderr(notice)
    sweep = Sweep(file=file, config=config, cells=cells)
    if found := list(_report_problems(sweep)):
        raise InputError("\n".join(found))
    return sweep


def _cells(config: SweepConfig, base: dict[str, Any]) -> Iterator[tuple[str, dict[str, str], dict[str, Any]]]:
    """Name, points and configuration of every cell."""
    training = overlaid(base, nested(config.changes or {})).get("training")
    first_seed = training.get("seed", TrainingConfig.seed) if isinstance(training, Mapping) else TrainingConfig.seed
    if type(first_seed) is not int:
        raise InputError(f"training.seed is {first_seed!r}; it must be an integer, the first of the sweep's seeds")
    for chosen in itertools.product(*config.axes.values()):
        points = dict(zip(config.axes, chosen, strict=True))
        changes = dict(config.changes or {})
        for axis, point in points.items():
            changes |= config.axes[axis][point] or {}
        for seed in range(first_seed, first_seed + config.seeds):
            name = BETWEEN.join([*chosen, f"seed={seed}"])
            run = Path(config.folder, name)
            yield name, points, overlaid(base, nested({**changes, "training.run_dir": str(run), "training.seed": seed}))


def _run_problems(config: RunConfig, *, needs_data: bool) -> list[str]:
    left_out = () if needs_data else ("data",)
    if found := config.section_problems(leaving=left_out):
        return found
    if config.training.epochs is not None:
        return [
            f"training.epochs is {config.training.epochs:g}, but a sweep's cells state their steps; set train_iters"
        ]
    return config.joint_problems(config.parallel.resolve_data_parallel_size(None))


def _in_cells(problem: str, names: list[str], cells: int) -> str:
    if len(names) == cells:
        return f"in every cell: {problem}"
    return f"cell {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {problem}"


def _change_problems(where: str, changes: Any) -> Iterator[str]:
    if changes is None:
        return
    if not isinstance(changes, Mapping):
        yield f"{where} is not a mapping; write {{section.field: value}}, or {{}} for none"
        return
    for name in changes:
        if not isinstance(name, str) or "." not in name:
            yield f"{where} has {name!r}, no field by its dotted name; write section.field"
        elif name in OVERRIDDEN:
            yield f"{where} has {name}, which each cell has its own of; leave it out"


def _report_problems(sweep: Sweep) -> Iterator[str]:
    report, config = sweep.config.report, sweep.cells[0].config
    sets = config.data.valid_data
    if report.metric is None:
        if len(sets) != 1:
            yield f"report.metric is not set, and data.valid_data has {len(sets)} sets; name the loss to compare"
    elif not (config.evaluation.perplexity.groups and report.metric.endswith(f"/{CROSS_ENTROPY}")):
        known = [LOSS, *(f"{VALIDATION_LOSS}/{name}" for name in sets)]
        known += [f"eval/{name}/{CROSS_ENTROPY}" for name in config.evaluation.perplexity.sets]
        if report.metric not in known:
            yield f"report.metric is {report.metric}, no loss that the runs measure; they have {', '.join(known)}"
    if report.over not in (None, *FITTED):
        for cell in sweep.cells:
            try:
                value = cell.field(report.over)
            except AttributeError:
                hint = advice(report.over)
                yield f"report.over is {report.over}, neither parameters, tokens nor a field; {hint or 'name one'}"
                return
            if isinstance(value, bool) or not isinstance(value, int | float):
                yield f"report.over is {report.over}, which is {value!r} in {cell.name}; name a field that is a number"
                return
