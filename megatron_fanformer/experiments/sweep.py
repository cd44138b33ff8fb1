"""Runs `megatron-fanformer sweep`: lists a sweep's cells, trains them, shows their state, or writes the report.

Each cell is a process `megatron-fanformer train`, or a task of a Slurm array. The folder of a cell's run alone decides
the cell's state, so a killed sweep continues when it is run again: complete cells are left out, and a cell that had
begun resumes from its checkpoint. However the sweep's process ends, the processes of its cells end, too.
"""

import functools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from megatron_fanformer.checkpoint.run_lock import run_lock
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import FanformerError, InputError, Interrupted
from megatron_fanformer.experiments.cells import ENDING_EARLY, Cell, Sweep, read_sweep
from megatron_fanformer.experiments.outcomes import (
    choices,
    due,
    group_by_points,
    in_play,
    outcome,
    outcomes,
    unfinished,
)
from megatron_fanformer.experiments.result import README
from megatron_fanformer.experiments.sweep_report import MISSING, write_report
from megatron_fanformer.experiments.verbs import SweepOptions
from megatron_fanformer.plan.job import training_flops_per_token
from megatron_fanformer.processes import SAVE_SIGNAL, end_with_owner, ended_by_stop_signals, signals_to, usable_cores
from megatron_fanformer.runtime import device
from megatron_fanformer.terminal import show, table

TRAIN = (sys.executable, "-m", "megatron_fanformer", "train")
POLL_SECONDS = 0.1
ERROR_MARK = "megatron-fanformer: "  # the beginning of the command's errors
SCRIPT = "array.sh"
DIRECTIVE = "#SBATCH"


class CellsFailed(FanformerError):
    """Cells of a sweep ended with an error, or without a result; the exit code is that of the first failed cell."""

    def __init__(self, message: str, exit_code: int = FanformerError.exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def sweep(options: SweepOptions) -> None:
    """Run the requested action.

    Raises:
        InputError: the sweep's file or a cell is wrong; the message has a line for each problem.
        Interrupted: a signal stopped the sweep.
        CellsFailed: cells failed.
    """
    if options.jobs < 1:
        raise InputError(f"--jobs is {options.jobs}; it must be at least 1")
    with ended_by_stop_signals():
        device.prepare_libraries()
        loaded = read_sweep(options.file, needs_data=options.action == "run")
        match options.action:
            case "dry-run":
                show(_plan_lines(loaded))
            case "run" if options.slurm is not None:
                print(f"sbatch {write_array(loaded, options.slurm)}")
            case "run":
                run_sweep(loaded, lambda line: show([line]), jobs=options.jobs)
                print(f"all cells are complete; sweep {options.file} report")
            case "status":
                show(_status_lines(loaded))
            case "report":
                result = write_report(loaded)
                missing = (row for table in result.tables if table.title == MISSING for row in table.rows)
                show(finding.sentence for finding in result.findings)
                show(f"no loss: {name}: {state}" for name, state in missing)
                show([f"wrote {loaded.folder / README}"])


def _plan_lines(sweep: Sweep) -> Iterator[str]:
    """Yield a table with a row for each point of all axes, then the number of cells, and of complete cells."""
    config, states = sweep.config, outcomes(sweep)
    compare, groups = config.report.compare, group_by_points(states)
    parameters_by_points = {tuple(group.points.values()): group.cell.parameters for group in groups}
    rows = []
    for points, cell, _ in groups:
        baseline_points = points | {compare: config.report.baseline}
        more = cell.parameters / parameters_by_points[tuple(baseline_points.values())] - 1
        flops = training_flops_per_token(cell.config.model) * cell.tokens
        rows.append((*points.values(), f"{cell.parameters:,}", f"{more:+.2%}", f"{cell.tokens:,}", f"{flops:.2e}"))
    columns = (*config.axes, "parameters", f"over {config.report.baseline}'s", "tokens", "FLOPs")
    yield from table(columns, rows, align="l" * len(config.axes) + "rrrr")
    yield "parameters are without embedding and head"
    complete = sum(outcome.state == "complete" for outcome in in_play(sweep, states))
    yield f"{config.num_cells} cells, {complete} of them complete"


def _status_lines(sweep: Sweep) -> Iterator[str]:
    states = outcomes(sweep)
    yield from (f"{outcome.cell.name}: {outcome}" for outcome in in_play(sweep, states))
    for choice in choices(sweep, states):
        edge = ", at the edge: a better one may lie beyond" if choice.is_at_the_edge else ""
        waiting = "its best point is chosen once its cells above have ended"
        yield ", ".join(choice.points.values()) + ": " + (f"{choice.best} is best{edge}" if choice.best else waiting)


def run_sweep(sweep: Sweep, log: Callable[[str], None], *, jobs: int = 1, command: Sequence[str] = TRAIN) -> None:
    """Run the cells that are not complete. A cell that fails does not stop the others; the error at the end names it.

    Args:
        log: called with a line about each cell.
        jobs: the number of cells that run at once.
        command: the words before `--config FILE` that train a cell.

    Raises:
        InputError: another `sweep` runs in the folder, or the folder has runs of other configurations.
        Interrupted: a signal stopped the sweep, after its running cells had saved.
        CellsFailed: cells failed, or lack the metric of the report.
    """
    runs = _Runs(sweep, log, command, jobs)
    with run_lock(sweep.folder), signals_to(runs.received.append):
        while True:  # the tuning cells run in the first round, the cells at the best points in the second
            playing = in_play(sweep, outcomes(sweep))
            cells = [cell for cell in due(playing) if cell.name not in runs.codes]
            if not cells:
                break
            runs.run(cells, first=len(playing) - len(cells) + 1)
    failed = {name: code for name, code in runs.codes.items() if code}
    if failed:
        message = f"{len(failed)} of {sweep.config.num_cells} cells failed: {', '.join(failed)}; see their .log"
        raise CellsFailed(message, next(iter(failed.values())))
    if left := due(playing):  # cells whose processes ended with exit code 0, but before the last step
        early = {f"{name} {cell.field(name)}" for cell in left for name in ENDING_EARLY if cell.field(name) is not None}
        by = f" by {', '.join(sorted(early))}" if early else ""
        names = ", ".join(cell.name for cell in left)
        raise CellsFailed(f"{names} ended before the last step{by}; run the same command to continue")
    if problems := unfinished(sweep, playing):
        raise CellsFailed("\n".join(problems))


def _write_configuration(cell: Cell) -> Path:
    file = cell.beside(".yaml")
    write_atomically(file, yaml.safe_dump(cell.config.as_dict(), sort_keys=False))
    return file


class _Running(NamedTuple):
    """A cell's process."""

    cell: Cell
    process: subprocess.Popen[bytes]
    started: float
    log_start: int
    """Size of the cell's log, in bytes, before this process began to write."""


class _Runs:
    """Processes of cells, at most `jobs` at a time, each until it ends or a signal stops it."""

    def __init__(self, sweep: Sweep, log: Callable[[str], None], command: Sequence[str], jobs: int) -> None:
        self.received: deque[signal.Signals] = deque()  # signals that the cells have not got yet
        self.codes: dict[str, int] = {}
        """Exit codes by the names of ended cells; 1 for a killed cell."""
        self._sweep, self._log, self._command, self._jobs = sweep, log, command, jobs
        self._running: list[_Running] = []
        self._is_stopped = False

    def run(self, cells: Sequence[Cell], *, first: int) -> None:
        """Run cells, numbered from `first`, until all have ended; raise Interrupted if a signal has stopped them."""
        waiting = deque(enumerate(cells, first))
        try:
            while (waiting and not self._is_stopped) or self._running:
                while waiting and len(self._running) < self._jobs and not self._is_stopped:
                    self._start(*waiting.popleft())
                while self.received:
                    self._pass_on(self.received.popleft())
                for running in list(self._running):
                    if running.process.poll() is not None:
                        self._running.remove(running)
                        self._end(running, running.process.returncode)
                time.sleep(POLL_SECONDS)
        finally:
            for running in self._running:
                running.process.kill()
                running.process.wait()
        if self._is_stopped:
            raise Interrupted("stopped; cells that had begun go on where they were: run the same command to continue")

    def _start(self, number: int, cell: Cell) -> None:
        self._log(f"[{number}/{self._sweep.config.num_cells}] {cell.name}")
        command = [*self._command, *_thread_options(cell, self._jobs), "--config", str(_write_configuration(cell))]
        cell.beside(".failed").unlink(missing_ok=True)
        with cell.beside(".log").open("ab") as log:
            log_start = log.tell()
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's signals are for this process, which passes them on
                preexec_fn=functools.partial(end_with_owner, os.getpid()),
            )
        self._running.append(_Running(cell, process, time.monotonic(), log_start))

    def _pass_on(self, received: signal.Signals) -> None:  # to all cells: a request to save, or SIGTERM
        is_save = received == SAVE_SIGNAL
        self._is_stopped |= not is_save  # every other signal stops the sweep
        for running in self._running:
            running.process.send_signal(received if is_save else signal.SIGTERM)

    def _end(self, ended: _Running, code: int) -> None:  # `code` is negative if a signal killed the process
        cell = ended.cell
        if code == Interrupted.exit_code:  # a signal to the sweep or to this cell stopped the cell: stop all
            self._pass_on(signal.SIGTERM)
            return
        if code and not self._is_stopped:
            lines = cell.beside(".log").read_bytes()[ended.log_start :].decode(errors="replace").splitlines()
            errors = [line.removeprefix(ERROR_MARK) for line in lines if line.startswith(ERROR_MARK)]
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}; see the .log"
            write_atomically(cell.beside(".failed"), f"{errors[-1] if errors else how}\nexit code {code}\n")
        self.codes[cell.name] = 1 if code < 0 else code
        self._log(f"    {cell.name}: {outcome(self._sweep, cell)} ({time.monotonic() - ended.started:.0f} s)")


def _thread_options(cell: Cell, jobs: int) -> list[str]:
    """Return options by which the ranks of `jobs` cells share the cores; none for one cell, or if threads are set."""
    if jobs == 1 or cell.config.runtime.threads_per_rank is not None or device.threads_of_environment() is not None:
        return []
    parallel = cell.config.parallel
    ranks = parallel.resolve_data_parallel_size(None) * parallel.model_parallel_size  # as `train` starts them
    return ["--runtime.threads_per_rank", str(max(1, usable_cores() // (jobs * ranks)))]


def write_array(sweep: Sweep, script: Path) -> Path:
    """Write the configurations of the cells that are due, and the script of a Slurm array; return the script's path.

    Args:
        script: a script that starts a single run from the arguments of `train`, as examples/slurm.sh does. Each task of
            the array has the script's directives.

    Raises:
        InputError: `script` cannot be read or has no directives, or there is nothing left to run.
        CellsFailed: there is nothing left to run, but cells lack the metric of the report.
    """
    try:
        lines = script.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--slurm {script} cannot be read ({error}); name a script such as slurm.sh") from None
    directives = [number for number, line in enumerate(lines) if line.startswith(DIRECTIVE)]
    if not directives:
        raise InputError(f"--slurm {script} has no line {DIRECTIVE}; name a script such as slurm.sh")
    playing = in_play(sweep, outcomes(sweep))
    cells = due(playing)
    if not cells:
        if problems := unfinished(sweep, playing):
            raise CellsFailed("\n".join(problems))
        raise InputError(f"all cells of {sweep.folder} are complete; use report")
    sweep.folder.mkdir(parents=True, exist_ok=True)
    first, last = directives[0], directives[-1]
    array = [
        *lines[:first],
        f"# The sweep {sweep.file}: a task for each cell that was not complete.",
        f"{DIRECTIVE} --array=0-{len(cells) - 1}",
        *lines[first : last + 1],
        f"cells=({shlex.join(str(_write_configuration(cell)) for cell in cells)})",
        "cell=${cells[SLURM_ARRAY_TASK_ID]}",
        'set -- --config "$cell" "$@"',
        "# What status, report and the choice of a tuned axis's best point read of a failed run.",
        "failed=${cell%.yaml}.failed",
        'rm -f "$failed"',
        """trap 'code=$?; case $code in 1|2|3|4) printf "exit code %s\\n" $code $code > "$failed" ;; esac' EXIT""",
        *lines[last + 1 :],
    ]
    destination = sweep.folder / SCRIPT
    write_atomically(destination, "\n".join(array) + "\n")
    return destination
