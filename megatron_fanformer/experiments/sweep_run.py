"""Runs a sweep's cells, so many at a time, each as a process `megatron-fanformer train`, or as a Slurm array.

The state of a cell is in its run's folder alone, so that a sweep that is killed at any moment goes on where it was:
complete cells are left out, one that had begun resumes from its checkpoint. A cell's process ends with the sweep's,
however that ends.
"""

import functools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from megatron_fanformer.checkpoint.run_lock import run_lock
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import FanformerError, InputError, Interrupted
from megatron_fanformer.experiments.cells import ENDING_EARLY, Cell, Sweep
from megatron_fanformer.experiments.outcomes import due, in_play, outcome, outcomes, unfinished
from megatron_fanformer.processes import SAVE_SIGNAL, end_with_owner, signals_held, signals_to, usable_cores
from megatron_fanformer.runtime import device

TRAIN = (sys.executable, "-m", "megatron_fanformer", "train")
POLL_SECONDS = 0.1
LOG_TAIL_BYTES = 1 << 16  # end of a cell's log that is searched for its error
ERROR_MARK = "megatron-fanformer: "  # the beginning of the command's errors
SCRIPT = "array.sh"
DIRECTIVE = "#SBATCH"


class CellsFailed(FanformerError):
    """Cells of a sweep ended with an error, or without a result; the exit code is the first failed one's."""

    def __init__(self, message: str, exit_code: int = FanformerError.exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_sweep(sweep: Sweep, log: Callable[[str], None], *, jobs: int = 1, command: Sequence[str] = TRAIN) -> None:
    """Run the cells that are not complete; those that fail are passed over, and named at the end.

    Args:
        log: called with a line about each cell.
        jobs: how many run at once.
        command: the words before `--config FILE` that train a cell.

    Raises:
        InputError: another `sweep` runs in the folder, or it has runs of other configurations.
        Interrupted: a signal stopped it, and the cells that were running have saved.
        CellsFailed: cells failed, or lack the metric of the report.
    """
    with run_lock(sweep.folder):
        runs = _Runs(sweep, log, command, jobs)
        with signals_to(runs.received.append):
            while True:
                playing = in_play(sweep, outcomes(sweep))
                cells = [cell for cell in due(playing) if cell.name not in runs.codes]
                if not cells:
                    break
                runs.run(cells, first=len(playing) - len(cells) + 1)
    failed = {name: code for name, code in runs.codes.items() if code}
    if failed:
        total = sweep.config.num_cells
        message = f"{len(failed)} of {total} cells failed: {', '.join(failed)}; see their .log"
        raise CellsFailed(message, next(iter(failed.values())))
    if left := due(playing):  # their processes ended with 0
        early = {f"{name} {value}" for cell in left for name in ENDING_EARLY if (value := cell.field(name)) is not None}
        by = f" by {', '.join(sorted(early))}" if early else ""
        names = ", ".join(cell.name for cell in left)
        raise CellsFailed(f"{names} ended before the last step{by}; run the same command to continue")
    if problems := unfinished(sweep, playing):
        raise CellsFailed("\n".join(problems))


def write_configuration(cell: Cell) -> None:
    """Write a cell's configuration, complete, beside its run's folder."""
    write_atomically(cell.file, yaml.safe_dump(cell.config.as_dict(), sort_keys=False))


class _Running(NamedTuple):
    """A cell's process."""

    cell: Cell
    process: subprocess.Popen[bytes]
    started: float
    log_start: int
    """Bytes of the cell's log that earlier processes wrote."""


class _Runs:
    """Processes of cells, at most `jobs` at a time, each until it ends or a signal stops it."""

    def __init__(self, sweep: Sweep, log: Callable[[str], None], command: Sequence[str], jobs: int) -> None:
        self.received: deque[signal.Signals] = deque()
        self.codes: dict[str, int] = {}
        """Exit codes of ended cells, by name; 1 for a killed one."""
        self._sweep, self._log, self._command, self._jobs = sweep, log, command, jobs
        self._running: dict[str, _Running] = {}
        self._is_stopped = False

    def run(self, cells: Sequence[Cell], *, first: int) -> None:
        """Run cells, numbered from `first`, to their ends. Raises Interrupted once a signal has stopped them."""
        waiting = deque(enumerate(cells, first))
        try:
            while (waiting and not self._is_stopped) or self._running:
                while waiting and len(self._running) < self._jobs and not self._is_stopped:
                    self._start(*waiting.popleft())
                self._pass_on_signals()
                for running in list(self._running.values()):
                    if running.process.poll() is not None:
                        del self._running[running.cell.name]
                        self._end(running, running.process.returncode)
                time.sleep(POLL_SECONDS)
        finally:
            for running in self._running.values():
                running.process.kill()
                running.process.wait()
        if self._is_stopped:
            raise Interrupted("stopped; cells that had begun go on where they were: run the same command to continue")

    def _start(self, number: int, cell: Cell) -> None:
        self._log(f"[{number}/{self._sweep.config.num_cells}] {cell.name}")
        write_configuration(cell)
        cell.failure.unlink(missing_ok=True)
        with cell.log.open("ab") as log, signals_held():  # the child holds them until it listens
            log_start = log.tell()
            process = subprocess.Popen(
                [*self._command, *_thread_options(cell, self._jobs), "--config", str(cell.file)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's signals are for this process, which passes them on
                preexec_fn=functools.partial(end_with_owner, os.getpid()),
            )
        self._running[cell.name] = _Running(cell, process, time.monotonic(), log_start)

    def _pass_on_signals(self) -> None:
        while self.received:
            number = self.received.popleft()
            goes_on = number == SAVE_SIGNAL
            self._is_stopped |= not goes_on
            for running in self._running.values():
                running.process.send_signal(number if goes_on else signal.SIGTERM)

    def _end(self, ended: _Running, code: int) -> None:
        cell = ended.cell
        if code == Interrupted.exit_code:  # by a signal to this cell alone, which is meant for the sweep
            self.received.append(signal.SIGTERM)
            self._pass_on_signals()
            return
        if code and not self._is_stopped:
            write_atomically(cell.failure, f"{_error_in(cell.log, ended.log_start, code)}\nexit code {code}\n")
        self.codes[cell.name] = 1 if code < 0 else code
        self._log(f"    {cell.name}: {outcome(self._sweep, cell)} ({time.monotonic() - ended.started:.0f} s)")


def _thread_options(cell: Cell, jobs: int) -> list[str]:
    """Return the options that give each rank its share of the cores, beside those of its cell and of the others."""
    if jobs == 1 or cell.config.runtime.threads_per_rank is not None or device.threads_of_environment() is not None:
        return []
    parallel = cell.config.parallel
    ranks = parallel.resolve_data_parallel_size(None) * parallel.model_parallel_size  # as `train` starts them
    return ["--runtime.threads_per_rank", str(max(1, usable_cores() // (jobs * ranks)))]


def _error_in(log: Path, start: int, code: int) -> str:
    """Return the last error in a cell's log from `start` on; how its process ended where there is none."""
    with log.open("rb") as stream:
        stream.seek(max(start, log.stat().st_size - LOG_TAIL_BYTES))
        lines = stream.read().decode(errors="replace").splitlines()
    errors = [line.removeprefix(ERROR_MARK) for line in lines if line.startswith(ERROR_MARK)]
    if errors:
        return errors[-1]
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}; see {log}"


# -- as a Slurm array: one task for each cell, by the user's own script for a single run


def write_array(sweep: Sweep, script: Path) -> Path:
    """Write the configurations of the cells that are due, and the array's script; returns its path.

    Args:
        script: starts a single run from the arguments of `train`, as examples/slurm.sh does; its directives are each
            task's.

    Raises:
        InputError: it cannot be read or has no directives, or there is nothing left to run.
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
    for cell in cells:
        write_configuration(cell)
    first, last = directives[0], directives[-1]
    array = [
        *lines[:first],
        f"# The sweep {sweep.file}: a task for each cell that was not complete.",
        f"{DIRECTIVE} --array=0-{len(cells) - 1}",
        *lines[first : last + 1],
        "",
        "cells=(",
        *(f"    {shlex.quote(str(cell.file))}" for cell in cells),
        ")",
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
