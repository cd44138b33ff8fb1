"""A sweep's file, read: its cells, each with the configuration that `train` would be given, all of them checked."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint.store import VALIDATION_LOSS
from megatron_fanformer.configuration import build, nested, overlaid, read_values
from megatron_fanformer.errors import InputError
from megatron_fanformer.experiments.sweeps.config import FITTED, LOSS, SweepConfig
from megatron_fanformer.terminal import plural
from megatron_fanformer.training.config import RunConfig, TrainingConfig, advice, config_from_dict, print_on_stderr
from megatron_fanformer.training.metrics import PERPLEXITY_LOSS_SUFFIX

BETWEEN = ","  # the names of a cell's points


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of a sweep."""

    name: str
    points: dict[str, str]
    """Its point on each axis."""
    tunes: bool
    """Whether it serves to choose the best point of `tune`, not the comparisons."""
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
    """All cells that may run; with a tuned axis, the comparisons use those at its best points (`tuning`)."""

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


def read_sweep(file: Path, *, needs_data: bool) -> Sweep:
    """Read a sweep's file, and check every cell's configuration as `train` would.

    Args:
        needs_data: whether the token files must be there.

    Raises:
        InputError: everything that is wrong with it, one line each.
    """
    return sweep_of(file, read_values(file), needs_data=needs_data)


def sweep_of(file: Path, values: dict[str, Any], *, needs_data: bool, base_file: Path | None = None) -> Sweep:
    """Return the sweep that a file with these values is. Raises like `read_sweep`.

    Args:
        base_file: the base, where the file's folder may not be there yet; None: as the values have it.
    """
    config = build(values, SweepConfig)
    if found := config.problems():
        raise InputError("\n".join(found))
    base = read_values(file.parent / config.base if base_file is None else base_file)
    cells: list[Cell] = []
    all_names: list[str] = []
    problems: dict[str, list[str]] = {}
    notices: dict[str, None] = {}  # the same ones in every cell
    for name, points, tunes, values in _cells(config, base):
        all_names.append(name)
        try:
            of_cell = config_from_dict(values, report=lambda notice: notices.update({notice: None}))
            cell = Cell(name=name, points=points, tunes=tunes, config=of_cell)
            found = _run_problems(cell.config, needs_data=needs_data)
        except InputError as error:
            found = str(error).splitlines()
        else:
            cells.append(cell)
        for problem in found:
            problems.setdefault(problem, []).append(name)
    if problems:
        raise InputError("\n".join(_in_cells(problem, names, len(all_names)) for problem, names in problems.items()))
    for notice in notices:
        print_on_stderr(notice)
    sweep = Sweep(file=file, config=config, cells=cells)
    if found := list(_report_problems(sweep)):
        raise InputError("\n".join(found))
    return sweep


def _cells(config: SweepConfig, base: dict[str, Any]) -> Iterator[tuple[str, dict[str, str], bool, dict[str, Any]]]:
    """Yield name, points, whether it is for tuning, and configuration of every cell."""
    training = overlaid(base, nested(config.changes or {})).get("training")
    first_seed = training.get("seed", TrainingConfig.seed) if isinstance(training, Mapping) else TrainingConfig.seed
    if type(first_seed) is not int:
        raise InputError(f"training.seed is {first_seed!r}; it must be an integer, the first of the sweep's seeds")
    for chosen in itertools.product(*config.axes.values()):
        points = dict(zip(config.axes, chosen, strict=True))
        changes = dict(config.changes or {})
        for axis, point in points.items():
            changes |= config.axes[axis][point] or {}
        for number in range(config.tune_seeds + config.seeds):
            seed = first_seed + number
            name = BETWEEN.join([*chosen, f"seed={seed}"])
            run = Path(config.folder, name)
            own = {**changes, "training.run_dir": str(run), "training.seed": seed}
            yield name, points, number < config.tune_seeds, overlaid(base, nested(own))


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


def metrics_of(config: RunConfig) -> list[str]:
    """Return the names of the losses that a run measures, but those of groups of perplexity sets: validation first."""
    validation = [f"{VALIDATION_LOSS}/{name}" for name in config.data.validation_sets]
    return [*validation, *(f"eval/{name}{PERPLEXITY_LOSS_SUFFIX}" for name in config.evaluation.perplexity.sets), LOSS]


def _report_problems(sweep: Sweep) -> Iterator[str]:
    report, config = sweep.config.report, sweep.cells[0].config
    sets = config.data.validation_sets
    if report.metric is None:
        if len(sets) != 1:
            own, named = plural(len(sets), "validation set"), ", ".join(metrics_of(config))
            yield f"report.metric is not set, and the runs have {own}; name one of {named}"
    elif not (config.evaluation.perplexity.groups and report.metric.endswith(PERPLEXITY_LOSS_SUFFIX)):
        known = metrics_of(config)
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
