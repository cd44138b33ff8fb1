"""Runs `megatron-fanformer sweep`: writes its file, lists or trains the cells, or shows their state or the report."""

import shlex
from collections.abc import Iterator, Sequence

import numpy as np

from megatron_fanformer.errors import InputError
from megatron_fanformer.experiments.sweeps.cells import Group, Outcome, groups_of, outcomes, parameters_of
from megatron_fanformer.experiments.sweeps.file import Cell, Sweep, read_sweep
from megatron_fanformer.experiments.sweeps.init import write_sweep
from megatron_fanformer.experiments.sweeps.tuning import choices, in_play
from megatron_fanformer.experiments.sweeps.verb import SweepOptions
from megatron_fanformer.options import PROGRAM
from megatron_fanformer.planning.flops import training_flops_per_token
from megatron_fanformer.planning.machines import Machine, load_machine
from megatron_fanformer.terminal import Row, plural, show, table


def sweep(options: SweepOptions) -> None:
    """Run the requested action.

    Raises:
        InputError: the sweep's file or a cell is wrong; every problem, one line each.
        Interrupted: a signal stopped it.
        CellsFailed: cells failed.
    """
    if options.jobs < 1:
        raise InputError(f"--jobs is {options.jobs}; it must be at least 1")
    if options.jobs > 1 and (options.action != "run" or options.slurm is not None):
        raise InputError("--jobs has no effect here; use it with run, without --slurm")
    if options.slurm is not None and options.action != "run":
        raise InputError(f"--slurm has no effect with {options.action}; use it with run")
    if options.gpu is not None and options.action != "dry-run":
        raise InputError(f"--gpu has no effect with {options.action}; use it with dry-run")
    if options.gpus is not None and options.gpu is None:
        raise InputError("--gpus has no effect without --gpu; add that, or leave it out")
    _refuse_options_of_init(options)
    if options.action == "init":
        show(_written_lines(write_sweep(options)))
        return
    machine = None if options.gpu is None else load_machine(options.gpu)
    found = read_sweep(options.file, needs_data=options.action == "run")
    match options.action:
        case "dry-run":
            show(_plan_lines(found, machine, options.gpus or 1))
        case "run" if options.slurm is not None:
            from megatron_fanformer.experiments.sweeps.run import write_array

            print(f"sbatch {write_array(found, options.slurm)}")
        case "run":
            from megatron_fanformer.experiments.sweeps.run import run_sweep

            run_sweep(found, lambda line: show([line]), jobs=options.jobs)
            print(f"all cells are complete; sweep {options.file} report")
        case "status":
            show(_status_lines(found))
        case "report":
            from megatron_fanformer.experiments.sweeps.report import summary, write_report

            show(summary(found.folder, write_report(found)))


def _refuse_options_of_init(options: SweepOptions) -> None:
    """Raise InputError where another action has what is for init alone."""
    given = {"--config": options.config, "--compare": options.compare, "--seeds": options.seeds}
    stray = [*(name for name, value in given.items() if value is not None), *options.overrides[:1]]
    if options.action != "init" and stray:
        raise InputError(f"{stray[0]} has no effect with {options.action}; use it with init")


def _written_lines(found: Sweep) -> Iterator[str]:
    config = found.config
    points, seeds = plural(len(config.axes[config.report.compare]), "point"), plural(config.seeds, "seed")
    yield f"{found.file}: {points} of {seeds} each, from {config.base}, compared by {found.metric}"
    yield from difference_lines(found)
    yield from (f"  {PROGRAM} sweep {shlex.quote(str(found.file))} {action}" for action in ("dry-run", "run", "report"))


def _status_lines(found: Sweep) -> Iterator[str]:
    done = outcomes(found)
    yield from (f"{each.cell.name}: {each}" for each in in_play(found, done))
    for choice in choices(found, done):
        at = ", ".join(choice.points.values())
        if choice.best is None:
            yield f"{at}: its best point is chosen once its cells above have ended"
        else:
            edge = ", at the edge: a better one may lie beyond" if choice.is_at_the_edge else ""
            yield f"{at}: {choice.best} is best{edge}"


def _plan_lines(found: Sweep, machine: Machine | None, gpus: int) -> Iterator[str]:
    """Yield a row for each point: what one cell of it has and takes, and what all of them take together."""
    done = outcomes(found)
    rate = _measured_rate(done)
    rows: list[Row] = []
    whole: list[float | None] = []
    flops = 0
    for points, cell, seeds in _planned(found, groups_of(done)):
        seconds = _seconds(cell, machine, gpus, rate)
        whole += [seconds] * seeds
        flops += _flops(cell) * seeds
        own = (f"{parameters_of(cell):,}", f"{cell.tokens:,}", f"{_flops(cell):.2e}", _duration(seconds))
        rows.append((*points, str(seeds), *own))
    numbers = ("seeds", "parameters", "tokens", "FLOPs", "time")
    align = "l" * len(found.config.axes) + "r" * len(numbers)
    yield from table((*found.config.axes, *numbers), rows, align=align)
    yield from difference_lines(found)
    complete = sum(each.state == "complete" for each in in_play(found, done))
    time = _duration(None if None in whole else sum(filter(None, whole)))
    cells = found.config.num_cells
    yield f"{cells} cells, {complete} of them complete; {flops:.2e} FLOPs, {time} one after the other"
    if machine is not None:
        yield f"time: by formula, on {gpus} x {machine.name}"
    elif rate is not None:
        yield f"time: by the {rate:.2e} FLOP/s of the steps in {found.folder}, without starts and evaluations"
    else:
        yield "time: not known before a cell has begun; --gpu estimates it for a machine"


def difference_lines(found: Sweep) -> Iterator[str]:
    """Yield how far the parameters of the compared points are from the baseline's, where other axes are the same."""
    report = found.config.report
    by_others: dict[tuple[str, ...], dict[str, int]] = {}
    for cell in found.cells:
        others = tuple(point for axis, point in cell.points.items() if axis != report.compare)
        by_others.setdefault(others, {})[cell.points[report.compare]] = parameters_of(cell)
    texts: list[str] = []
    for point in found.config.axes[report.compare]:
        if point != report.baseline:
            shares = [each[point] / each[report.baseline] - 1 for each in by_others.values()]
            low, high = f"{min(shares):+.2%}", f"{max(shares):+.2%}"
            texts.append(f"{point} {low}" if low == high else f"{point} {low} to {high}")
    if texts:
        yield f"parameters, without embedding and head, against {report.baseline}'s: {', '.join(texts)}"


def _planned(found: Sweep, groups: Sequence[Group]) -> Iterator[tuple[list[str], Cell, int]]:
    """Yield points, a cell and a number of seeds: of tuning, and of the best points, by a cell of the same cost."""
    tune = found.config.tune
    for group in groups:
        yield list(group.points.values()), group.cell, found.config.tune_seeds if tune else found.config.seeds
    if tune is not None:
        first = next(iter(found.config.axes[tune.axis]))
        for group in groups:
            if group.points[tune.axis] == first:
                points = {**group.points, tune.axis: "the best"}
                yield list(points.values()), group.cell, found.config.seeds


def _flops(cell: Cell) -> int:
    return training_flops_per_token(cell.config.model) * cell.tokens


def _measured_rate(done: Sequence[Outcome]) -> float | None:
    rates = [each.flops_per_second for each in done if each.flops_per_second is not None]
    return float(np.median(rates)) if rates else None


def _seconds(cell: Cell, machine: Machine | None, gpus: int, rate: float | None) -> float | None:
    if machine is None:
        return None if rate is None else _flops(cell) / rate
    from megatron_fanformer.planning.machines import known_machines
    from megatron_fanformer.planning.step_time import step_time
    from megatron_fanformer.sizing.estimate import check_formats, for_machine, job_of, problems

    # As `plan`: a known machine is a GPU; a file may also describe the CPUs that a configuration asks for.
    on_cpu = cell.config.runtime.device == "cpu" and machine not in known_machines().values()
    config = for_machine(cell.config, machine, on_cpu=on_cpu)
    found = problems(config, gpus)
    try:
        check_formats(config, machine)
    except InputError as error:
        found.append(str(error))
    if found:
        raise InputError("\n".join(f"cell {cell.name}: {problem}" for problem in found))
    return step_time(job_of(config, gpus), machine).seconds * config.training.steps


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes = seconds / 60
    if minutes < 120:
        return f"{minutes:.1f} min"
    return f"{minutes / 60:.1f} h" if minutes < 48 * 60 else f"{minutes / 1440:.1f} days"
