"""The fields of a sweep's file: a base configuration, axes of named points, seeds, and the comparisons of its report.

    experiment: the paper's claim
    folder: runs/sweeps/claim
    base: laptop.yaml                       # beside this file
    changes: {training.train_iters: 300}    # of every cell
    axes:
      arm:
        transformer: {model.fan.placement: none}
        p0: {model.fan.p_ratio: 0.0, model.ffn_hidden_size: 277}
        fanformer: {model.ffn_hidden_size: 288}
      lr:
        lr1e-3: {optimizer.lr: 1.0e-3}
        lr2e-3: {optimizer.lr: 2.0e-3}
    tune: {axis: lr, seeds: 1}              # the best rate of each arm, by runs of one seed
    seeds: 5                                # then as many others at that rate
    report:
      compare: arm
      baseline: transformer
      other_baselines: [p0]
      primary: [[fanformer, transformer], [fanformer, p0]]   # said to be lower, before anything ran

A cell is one point of every axis and one seed. Its configuration is the base, then `changes`, then its points in the
order of the axes; its name, and that of its run's folder, is made of its points' names: `fanformer,lr1e-3,seed=1`.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_fanformer.experiments.intervals import FEWEST_SEEDS, FEWEST_STEPS

LOSS = "loss"  # the training loss
FITTED = ("parameters", "tokens")  # what a power law is fitted over
OVERRIDDEN = ("training.run_dir", "training.seed")
"""Fields that every cell sets for itself."""
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
    paper: Any = field(default_factory=dict)
    """The paper's losses by the points of `compare`, in nats per token."""
    paper_saving: float | None = None
    """With a power law: the share of the baseline's parameters, or tokens, that the paper's model needs for its
    loss."""
    same_settings: bool = False
    """Whether model, data and length are the paper's."""

    def problems(self) -> list[str]:
        """Return the rules of single fields that this section breaks, one line each."""
        found = [
            f"report.{name} is {value}; it must be at least {least}"
            for name, value, least in (
                ("average_steps", self.average_steps, 1),
                ("fewest_seeds", self.fewest_seeds, 2),
                ("fewest_steps", self.fewest_steps, 1),
            )
            if value < least
        ]
        if self.average_steps > 1 and self.metric != LOSS:
            found.append(
                "report.average_steps is set without report.metric loss; other metrics are taken once, at the end"
            )
        if not isinstance(self.paper, Mapping) or any(type(value) not in (int, float) for value in self.paper.values()):
            found.append("report.paper is not a mapping to numbers; write {POINT: loss}")
        if self.paper_saving is not None and self.over not in FITTED:
            found.append(f"report.paper_saving is set, and nothing is fitted; set report.over to {' or '.join(FITTED)}")
        found += [
            f"report.{name} is set, and a power law is fitted over {self.over}; leave one of them out"
            for name in ("by", "other_baselines", "primary")
            if getattr(self, name) and self.over in FITTED
        ]
        found += [
            f"report.primary has {pair}, which is not a pair of two points; write [POINT, BASELINE]"
            for pair in self.primary
            if len(pair) != 2 or pair[0] == pair[1]
        ]
        return found

    def points_named(self) -> Iterator[tuple[str, Any]]:
        """Yield the points of `compare` that fields name, each with its field."""
        yield "baseline", self.baseline
        for name in self.other_baselines:
            yield "other_baselines", name
        for pair in self.primary:
            for name in pair:
                yield "primary", name
        for name in self.paper if isinstance(self.paper, Mapping) else ():
            yield "paper", name


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
        """List what is wrong with the file by itself, one line each."""
        counts = {"seeds": self.seeds, "limit": self.limit, "tune.seeds": self.tune_seeds if self.tune else 1}
        found = [f"{name} is {value}; it must be at least 1" for name, value in counts.items() if value < 1]
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
        found += self._axis_problems()
        if not found and self.num_cells > self.limit:
            found.append(f"the axes and seeds make {self.num_cells:,} cells, more than limit {self.limit}; raise it")
        return [*found, *self.report.problems()]

    def _axis_problems(self) -> Iterator[str]:
        """Yield what fields name that is no axis, or no point of the compared one."""
        report = self.report
        named = [("report.compare", report.compare), *(("report.by", axis) for axis in report.by)]
        if self.tune is not None:
            named.append(("tune.axis", self.tune.axis))
        for name, axis in named:
            if axis not in self.axes:
                yield f"{name} is {axis}, no axis; the axes are {', '.join(map(str, self.axes))}"
        if len({axis for _, axis in named}) < len(named):
            yield "report.compare, report.by and tune.axis name an axis twice; an axis has one use"
        points = self.axes.get(report.compare)
        if isinstance(points, Mapping):
            for name, point in report.points_named():
                if point not in points:
                    known = ", ".join(map(str, points))
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
