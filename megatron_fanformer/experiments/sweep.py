"""Runs `megatron-fanformer sweep`: writes its file, lists or trains the cells, or shows their state or the report."""

import dataclasses
import os
import shlex
from collections.abc import Iterator
from typing import Any

import numpy as np
import yaml

from megatron_fanformer.configuration import by_dotted_names, overlaid, read_overrides, read_values
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.experiments.cells import LOSS, OVERRIDDEN, Cell, Sweep, metrics_of, read_sweep, sweep_of
from megatron_fanformer.experiments.intervals import FEWEST_SEEDS
from megatron_fanformer.experiments.outcomes import choices, groups_of, in_play, outcomes
from megatron_fanformer.experiments.result import README
from megatron_fanformer.experiments.sweep_report import MISSING, write_report
from megatron_fanformer.experiments.sweep_run import run_sweep, write_array
from megatron_fanformer.experiments.variants import VARIANTS, variant_like
from megatron_fanformer.experiments.verbs import SweepOptions
from megatron_fanformer.options import PROGRAM
from megatron_fanformer.plan.job import training_flops_per_token
from megatron_fanformer.plan.machines import Machine, load_machine
from megatron_fanformer.processes import ended_by_stop_signals
from megatron_fanformer.runtime import device
from megatron_fanformer.runtime.launch import report_stopped
from megatron_fanformer.terminal import Row, plural, show, table
from megatron_fanformer.train.config import RunConfig, advice, config_from_dict

ACTIONS = {
    "jobs": "run",
    "slurm": "run",
    "gpu": "dry-run",
    "config": "init",
    "compare": "init",
    "seeds": "init",
    "overrides": "init",
}
"""The action that each option is for."""
AXIS = "model"
COMPARED = ("transformer", "fanformer")  # where nothing is named
SUFFIXES = (".yaml", ".yml")
HEADER = """\
# {points}, from {base}: as many parameters, the same steps and data.
# All have one learning rate, which may suit one of them best: `tune` finds that of each (docs/experiments.md#sweeps).
#
# Start: megatron-fanformer sweep {file} run

"""


def sweep(options: SweepOptions) -> None:
    """Run the requested action.

    Raises:
        InputError: the sweep's file or a cell is wrong; every problem, one line each.
        Interrupted: a signal stopped it.
        CellsFailed: cells failed.
    """
    with ended_by_stop_signals(report_stopped):
        device.prepare_libraries()
        _act(options)


def _act(options: SweepOptions) -> None:
    if options.jobs is not None and options.jobs < 1:
        raise InputError(f"--jobs is {options.jobs}; it must be at least 1")
    for name, action in ACTIONS.items():
        if getattr(options, name) not in (None, ()) and options.action != action:
            given = options.overrides[0] if name == "overrides" else f"--{name}"
            raise InputError(f"{given} has no effect with {options.action}; use it with {action}")
    if options.gpus is not None and options.gpu is None:
        raise InputError("--gpus has no effect without --gpu; add that, or leave it out")
    if options.action == "init":
        show(_written_lines(write_sweep(options)))
        return
    machine = None if options.gpu is None else load_machine(options.gpu)
    loaded = read_sweep(options.file, needs_data=options.action == "run")
    match options.action:
        case "dry-run":
            show(_plan_lines(loaded, machine, options.gpus or 1))
        case "run" if options.slurm is not None:
            print(f"sbatch {write_array(loaded, options.slurm)}")
        case "run":
            run_sweep(loaded, lambda line: show([line]), jobs=options.jobs or 1)
            print(f"all cells are complete; sweep {options.file} report")
        case "status":
            show(_status_lines(loaded))
        case "report":
            result = write_report(loaded)
            missing = (row for table in result.tables if table.title == MISSING for row in table.rows)
            show(finding.sentence for finding in result.findings)
            show(f"no loss: {name}: {state}" for name, state in missing)
            show([f"wrote {loaded.folder / README}"])


def _written_lines(sweep: Sweep) -> Iterator[str]:
    config = sweep.config
    points, seeds = plural(len(config.axes[config.report.compare]), "point"), plural(config.seeds, "seed")
    yield f"{sweep.file}: {points} of {seeds} each, from {config.base}, compared by {sweep.metric}"
    yield from difference_lines(sweep)
    yield from (f"  {PROGRAM} sweep {shlex.quote(str(sweep.file))} {action}" for action in ("dry-run", "run", "report"))


def _status_lines(sweep: Sweep) -> Iterator[str]:
    done = outcomes(sweep)
    yield from (f"{outcome.cell.name}: {outcome}" for outcome in in_play(sweep, done))
    for choice in choices(sweep, done):
        at = ", ".join(choice.points.values())
        if choice.best is None:
            yield f"{at}: its best point is chosen once its cells above have ended"
        else:
            edge = ", at the edge: a better one may lie beyond" if choice.is_at_the_edge else ""
            yield f"{at}: {choice.best} is best{edge}"


# -- dry-run


def _plan_lines(sweep: Sweep, machine: Machine | None, gpus: int) -> Iterator[str]:
    """Yield a row for each point, with the cost of one of its cells, and a line with that of all cells."""
    done = outcomes(sweep)
    config, tune = sweep.config, sweep.config.tune
    rates = [outcome.flops_per_second for outcome in done if outcome.flops_per_second is not None]
    rate = float(np.median(rates)) if rates else None
    planned = [(group.points, group.cell, config.tune_seeds or config.seeds) for group in groups_of(done)]
    if tune is not None:  # the best points are not known yet: a cell of each has the same cost
        first = next(iter(config.axes[tune.axis]))
        at_first = [(points, cell) for points, cell, _ in planned if points[tune.axis] == first]
        planned += [({**points, tune.axis: "the best"}, cell, config.seeds) for points, cell in at_first]
    rows: list[Row] = []
    total_seconds, total_flops = 0.0, 0
    for points, cell, seeds in planned:
        flops = training_flops_per_token(cell.config.model) * cell.tokens
        seconds = None if rate is None else flops / rate
        if machine is not None:
            seconds = _seconds_on(machine, cell, gpus)
        total_seconds += seeds * (seconds or 0.0)
        total_flops += seeds * flops
        numbers = (f"{cell.parameters:,}", f"{cell.tokens:,}", f"{flops:.2e}", _duration(seconds))
        rows.append((*points.values(), str(seeds), *numbers))
    columns = (*config.axes, "seeds", "parameters", "tokens", "FLOPs", "time")
    yield from table(columns, rows, align="l" * len(config.axes) + "rrrrr")
    yield from difference_lines(sweep)
    complete = sum(outcome.state == "complete" for outcome in in_play(sweep, done))
    time = _duration(total_seconds or None)
    yield f"{config.num_cells} cells, {complete} of them complete; {total_flops:.2e} FLOPs, {time} one after the other"
    if machine is not None:
        yield f"time: by formula, on {gpus} x {machine.name}"
    elif rate is not None:
        yield f"time: by the {rate:.2e} FLOP/s of the steps in {sweep.folder}, without starts and evaluations"
    else:
        yield "time: not known before a cell has begun; --gpu estimates it for a machine"


def difference_lines(sweep: Sweep) -> Iterator[str]:
    """Yield how far the parameters of the compared points are from the baseline's, where other axes are the same."""
    report = sweep.config.report
    by_others: dict[tuple[str, ...], dict[str, int]] = {}
    for cell in sweep.cells:
        others = tuple(point for axis, point in cell.points.items() if axis != report.compare)
        by_others.setdefault(others, {})[cell.points[report.compare]] = cell.parameters
    texts: list[str] = []
    for point in sweep.config.axes[report.compare]:
        if point != report.baseline:
            shares = [parameters[point] / parameters[report.baseline] - 1 for parameters in by_others.values()]
            low, high = f"{min(shares):+.2%}", f"{max(shares):+.2%}"
            texts.append(f"{point} {low}" if low == high else f"{point} {low} to {high}")
    if texts:
        yield f"parameters, without embedding and head, against {report.baseline}'s: {', '.join(texts)}"


def _seconds_on(machine: Machine, cell: Cell, gpus: int) -> float:
    """Return the time of a cell's steps, by formula.

    Raises:
        InputError: the machine lacks a layout's GPUs or a number format.
    """
    from megatron_fanformer.plan.estimate import check_formats, for_machine, job_of, problems
    from megatron_fanformer.plan.step_time import step_time

    config = for_machine(cell.config, machine)
    lines = problems(config, gpus)
    try:
        check_formats(config, machine)
    except InputError as error:
        lines.append(str(error))
    if lines:
        raise InputError("\n".join(f"cell {cell.name}: {line}" for line in lines))
    return step_time(job_of(config, gpus), machine).seconds * config.training.steps


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes = seconds / 60
    if minutes < 120:
        return f"{minutes:.1f} min"
    return f"{minutes / 60:.1f} h" if minutes < 48 * 60 else f"{minutes / 1440:.1f} days"


# -- init


def write_sweep(options: SweepOptions) -> Sweep:
    """Write the file that `sweep FILE init` describes, checked as `run` would check it; returns the sweep.

    Raises:
        InputError: the file is there, nothing measures a loss to compare, or a cell could not be trained.
    """
    file, names = options.file, options.compare or COMPARED
    if options.config is None:
        raise InputError("init needs the configuration of a run; add --config RUN_YAML")
    if file.suffix not in SUFFIXES:
        raise InputError(f"{file} is no name for a sweep's file; name it NAME.yaml")
    if file.exists():
        raise InputError(f"{file} exists, and init replaces nothing; name another file")
    if len(names) < 2 or len({*names}) < len(names) or not {*names} <= VARIANTS.keys():
        raise InputError(f"--compare is {' '.join(names)}; name two or more of {', '.join(VARIANTS)}, each once")
    changes = read_overrides(options.overrides, advice=advice)
    if stray := [name for name in OVERRIDDEN if name in changes]:
        raise InputError(f"--{stray[0]} has no effect with init: each cell has its own; leave it out")
    base = read_values(options.config)
    run = config_from_dict(overlaid(base, changes), report=lambda _notice: None)  # the cells report the same
    metric = metrics_of(run)[0]
    if metric == LOSS:
        raise InputError(
            f"{options.config} has no validation, by which models are compared; set data.valid_data, or data.split "
            "such as '95,5,0'"
        )
    experiment = f"{names[0]} and {', '.join(names[1:])}"
    values = {
        "experiment": experiment,
        "folder": str(file.with_suffix("")),
        "base": os.path.relpath(os.path.realpath(options.config), os.path.realpath(file.parent)),  # through links, too
        **({"changes": changes} if changes else {}),
        "axes": {AXIS: {name: _model_changes(run, name) for name in names}},
        "seeds": FEWEST_SEEDS if options.seeds is None else options.seeds,
        "report": {
            "compare": AXIS,
            "baseline": names[0],
            "primary": [[name, names[0]] for name in names[1:]],
            "metric": metric,
        },
    }
    sweep = sweep_of(file, values, lambda _config: base, needs_data=False)
    # Sections as blocks, and the changes of a point on its line, as in the sweeps that ship.
    text = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=110, allow_unicode=True)
    header = HEADER.format(points=experiment.capitalize(), base=values["base"], file=file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, header + text)
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror}); name another file") from None
    return sweep


def _model_changes(base: RunConfig, name: str) -> dict[str, Any]:
    """Return the fields of the model in which a variant differs from the run's."""
    model = variant_like(base.model, name, divided_by=base.parallel.tensor_model_parallel_size)
    before, after = (by_dotted_names(dataclasses.asdict(config)) for config in (base.model, model))
    return {f"model.{field}": value for field, value in after.items() if before[field] != value}
