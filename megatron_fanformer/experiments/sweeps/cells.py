"""A sweep's cells: their configurations, all checked, and their states and results, as the runs' folders say."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.run_folder import VALIDATION_LOSS
from megatron_fanformer.configuration import build, nested, overlaid, read_values
from megatron_fanformer.errors import DivergenceError, InputError
from megatron_fanformer.evaluate.config import PerplexityConfig
from megatron_fanformer.experiments.sweeps.config import FITTED, LOSS, SweepConfig
from megatron_fanformer.terminal import plural
from megatron_fanformer.train.config import (
    UNSTATED,
    RunConfig,
    TrainingConfig,
    advice,
    config_from_dict,
    print_on_stderr,
)
from megatron_fanformer.train.metrics import PERPLEXITY_LOSS_SUFFIX, read_metrics

State = Literal["complete", "failed", "begun", "to come"]
DIVERGED = f"exit code {DivergenceError.exit_code}"  # a line of a cell's .failed
DETERMINING = ("model", "data", "optimizer", "schedule", "training")
"""The sections of a configuration that decide what a run learns, up to rounding."""
ENDING_EARLY = ("training.exit_interval", "training.exit_duration_in_mins")
"""Fields by which a run ends before its last step, with exit code 0, to be started again."""
OF_MACHINE = {
    *(f"training.{name}" for name in ("run_dir", "micro_batch_size", "eval_interval", "max_restarts")),
    *ENDING_EARLY,
    *(f"data.{name}" for name in ("num_workers", "cache_path", "staging_path")),
    "data.allow_change",  # of one start: the trainer itself holds a run to its data
}
"""Fields of these that do not: where a run lies, when it pauses and measures (after its last step in any case), and how
its machine reads and computes; a run fills in what is left to the machine."""
CUTTING = ("chunking", "chunk_tokens", "limit_tokens", "npy_dtype", "eod_id")
"""Fields of `evaluation.perplexity` that decide which tokens of a set are scored, and what is before them."""
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
    if problems_here := config.problems():
        raise InputError("\n".join(problems_here))
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
            problems_here = _run_problems(cell.config, needs_data=needs_data)
        except InputError as error:
            problems_here = str(error).splitlines()
        else:
            cells.append(cell)
        for problem in problems_here:
            problems.setdefault(problem, []).append(name)
    if problems:
        raise InputError("\n".join(_in_cells(problem, names, len(all_names)) for problem, names in problems.items()))
    for notice in notices:
        print_on_stderr(notice)
    sweep = Sweep(file=file, config=config, cells=cells)
    if problems_here := list(_report_problems(sweep)):
        raise InputError("\n".join(problems_here))
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


# -- states and results


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The state of a cell, as its folder shows it."""

    cell: Cell
    state: State
    step: int
    """The last step in its metrics; 0 before the first."""
    failure: str | None
    """The error that its last run ended with."""
    diverged: bool
    """Whether it ended by divergence, which a too high learning rate causes again at every try."""
    loss: float | None
    """The loss by the sweep's metric; None unless it is complete."""
    seconds: float
    """Time of its training steps."""
    flops_per_second: float | None
    """Median FLOP/s over its steps."""

    def __str__(self) -> str:
        steps = f"step {self.step:,} of {self.cell.config.training.steps:,}"
        match self.state:
            case "complete":
                if self.loss is None:
                    return "complete, but its last step has not the metric; remove its folder to train it again"
                return f"complete, loss {self.loss:.4f}"
            case "failed":
                return f"failed at {steps}: {self.failure}"
            case "begun":
                return steps
        return self.state


def is_complete(cell: Cell) -> bool:
    """Return whether the checkpoint of a cell's last step is there: its metrics, written before it, are then whole."""
    saved = run_folder.complete_checkpoints(cell.run)
    return bool(saved) and (run_folder.step_of(saved[-1]) or 0) >= cell.config.training.steps


def outcome(cell: Cell, metric: str, *, average_steps: int = 1) -> Outcome:
    """Return the state and result of a cell.

    Args:
        metric: the name of its loss in its metrics.
        average_steps: how many of the last steps the loss is the mean of, where it is the training loss.
    """
    metrics = _metrics(cell)
    failure = cell.failure.read_text(encoding="utf-8").splitlines() if cell.failure.is_file() else None
    state: State = "begun" if metrics else "to come"
    if is_complete(cell):
        state = "complete"
    elif failure is not None:
        state = "failed"
    speeds = [entry["model_flops_per_second"] for entry in metrics if "model_flops_per_second" in entry]
    return Outcome(
        cell=cell,
        state=state,
        step=metrics[-1]["step"] if metrics else 0,
        failure=failure[0] if failure and state == "failed" else None,
        diverged=state == "failed" and failure is not None and DIVERGED in failure[1:],
        loss=_loss(metrics, metric, average_steps) if state == "complete" else None,
        seconds=sum(entry.get("step_seconds", 0.0) for entry in metrics),
        flops_per_second=float(np.median(speeds)) if speeds else None,
    )


def outcomes(sweep: Sweep) -> list[Outcome]:
    """Return the state and result of each cell, of those too that no best point was chosen for.

    Raises:
        InputError: runs in the folder are of other configurations than the file's.
    """
    refuse_other_runs(sweep)
    steps = sweep.config.report.average_steps
    return [outcome(cell, sweep.metric, average_steps=steps) for cell in sweep.cells]


def refuse_other_runs(sweep: Sweep) -> None:
    """Raise InputError for cells whose folders have runs of other configurations; one line each."""
    if problems := [problem for cell in sweep.cells if (problem := _difference(cell, sweep.metric)) is not None]:
        raise InputError("\n".join(problems))


def _metrics(cell: Cell) -> list[dict[str, Any]]:
    try:
        return read_metrics(cell.run)
    except FileNotFoundError:
        return []


def _loss(metrics: list[dict[str, Any]], metric: str, average_steps: int) -> float | None:
    if metric == LOSS:
        losses = [entry[LOSS] for entry in metrics[-average_steps:] if entry.get(LOSS) is not None]
        return float(np.mean(losses)) if losses else None
    value = metrics[-1].get(metric) if metrics else None
    return float(value) if isinstance(value, int | float) else None


def _difference(cell: Cell, metric: str) -> str | None:
    """Describe how the run in a cell's folder differs from the cell, if there is one and it does."""
    file = cell.run / run_folder.CONFIG
    if not file.is_file():
        return None
    there, here = (_determining(values, metric) for values in (_saved(file), cell.config.as_dict()))
    for name, value in here.items():
        if (before := there.get(name, UNSTATED.get(name))) != value:
            return (
                f"{cell.run} has a run with {name} {before}, and the sweep's file makes it {value}; name another "
                "folder, or remove that one"
            )
    return None


def _saved(file: Path) -> Mapping[str, Any]:
    """Return a run's configuration. What an earlier version's run does not state, it had as the default is."""
    values = run_folder.read_mapping(file)
    try:
        return config_from_dict(values, report=lambda _notice: None).as_dict()
    except InputError:  # of a version with other fields: compared as it stands
        return values


def _determining(values: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return the fields of a configuration that decide a cell's loss, by their dotted names."""
    learnt = {
        f"{section}.{name}": value
        for section in DETERMINING
        for name, value in (values.get(section) or {}).items()
        if f"{section}.{name}" not in OF_MACHINE
    }
    return learnt | _measuring(values, metric)


def _measuring(values: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return those that decide how a perplexity set's loss is measured; other losses are by DETERMINING's alone."""
    name = metric.removeprefix("eval/").removesuffix(PERPLEXITY_LOSS_SUFFIX)
    if metric != f"eval/{name}{PERPLEXITY_LOSS_SUFFIX}":
        return {}
    evaluation = values.get("evaluation") or {}
    perplexity = asdict(PerplexityConfig()) | (evaluation.get("perplexity") or {})
    files = perplexity["sets"].get(name)
    fields = {f"sets.{name}": files, **{field: perplexity[field] for field in CUTTING}}
    if files is None:  # it is of one of the paper's groups
        fields["folder"] = perplexity["folder"]
    return {f"evaluation.perplexity.{field}": value for field, value in fields.items()}


# -- cells that differ in seed alone


class Group(NamedTuple):
    """The cells that differ in seed alone."""

    points: dict[str, str]
    """Its point on each axis."""
    cell: Cell
    """One of its cells, for what they share."""
    losses: dict[int, float]
    """Losses by seed, of the cells that have one."""


def groups_of(outcomes: Sequence[Outcome]) -> list[Group]:
    """Return all points, in the order of the cells."""
    groups: dict[tuple[str, ...], Group] = {}
    for outcome in outcomes:
        key = tuple(outcome.cell.points.values())
        group = groups.setdefault(key, Group(outcome.cell.points, outcome.cell, {}))
        if outcome.loss is not None:
            group.losses[outcome.cell.seed] = outcome.loss
    return list(groups.values())


def size_of(sweep: Sweep, cell: Cell) -> float:
    """Return a cell's place on the axis that the losses are drawn over."""
    match sweep.config.report.over:
        case "parameters":
            return float(parameters_of(cell))
        case "tokens":
            return float(cell.tokens)
        case None:
            return 0.0
        case name:
            return float(cell.field(name))


def parameters_of(cell: Cell) -> int:
    """Return a cell's parameters outside the embedding and the head, as the paper counts its Transformers' (268M at
    300M).
    """
    model = cell.config.model
    return model.num_parameters - model.padded_vocab_size * model.hidden_size * (
        1 + model.untie_embeddings_and_output_weights
    )
