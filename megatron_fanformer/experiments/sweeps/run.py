"""Runs a sweep's cells one after the other, each as a process `megatron-fanformer train`, or as a Slurm array.

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

import yaml

from megatron_fanformer.checkpoint.run_lock import run_lock
from megatron_fanformer.durable_files import regular_file, write_atomically
from megatron_fanformer.errors import FanformerError, InputError, Interrupted
from megatron_fanformer.experiments.sweeps.cells import is_complete, outcome, refuse_other_runs
from megatron_fanformer.experiments.sweeps.file import Cell, Sweep
from megatron_fanformer.processes import SAVE_SIGNAL, end_with_owner, signals_held, signals_to

TRAIN = (sys.executable, "-m", "megatron_fanformer", "train")
POLL_SECONDS = 0.1
LOG_TAIL_BYTES = 1 << 16  # of a cell's log, in which its error is looked for
ERROR_MARK = "megatron-fanformer: "  # what the command's errors begin with
SCRIPT = "array.sh"
MOST_BYTES = 1 << 20  # of the user's script
DIRECTIVE = "#SBATCH"


class CellsFailed(FanformerError):
    """Cells of a sweep ended with an error, each reported on its own line; the exit code is the first one's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_sweep(sweep: Sweep, log: Callable[[str], None], *, command: Sequence[str] = TRAIN) -> None:
    """Run the cells that are not complete; those that fail are passed over, and named at the end.

    Args:
        log: called with a line about each cell.
        command: what trains a cell, before `--config FILE`.

    Raises:
        InputError: another `sweep` runs in the folder, or it has runs of other configurations.
        Interrupted: a signal stopped it, and the cell that was running has saved.
        CellsFailed: cells failed.
    """
    with run_lock(sweep.folder):
        refuse_other_runs(sweep)
        failed: list[tuple[Cell, int]] = []
        received: deque[signal.Signals] = deque()
        with signals_to(received.append):
            for number, cell in enumerate(sweep.cells, 1):
                if is_complete(cell):
                    continue
                log(f"[{number}/{len(sweep.cells)}] {cell.name}")
                started = time.monotonic()
                code = _run_cell(cell, command, received)
                if code == Interrupted.exit_code or received:
                    raise Interrupted(
                        f"stopped in {cell.name}, which goes on where it was; run the same command to continue"
                    )
                if code:
                    failed.append((cell, code))
                found = outcome(cell, sweep.metric, average_steps=sweep.config.report.average_steps)
                log(f"    {found} ({time.monotonic() - started:.0f} s)")
    if failed:
        names = ", ".join(cell.name for cell, _ in failed)
        raise CellsFailed(f"{len(failed)} of {len(sweep.cells)} cells failed: {names}; see their .log", failed[0][1])


def write_configuration(cell: Cell) -> None:
    """Write a cell's configuration, complete, beside its run's folder."""
    write_atomically(cell.file, yaml.safe_dump(cell.config.as_dict(), sort_keys=False))


def _run_cell(cell: Cell, command: Sequence[str], received: "deque[signal.Signals]") -> int:
    """Train one cell to its end, or until a signal comes; its exit code, 1 where it was killed."""
    write_configuration(cell)
    cell.failure.unlink(missing_ok=True)
    with cell.log.open("ab") as log, signals_held():  # by the child, until it listens
        process = subprocess.Popen(
            [*command, "--config", str(cell.file)],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's signals are for this process, which passes them on
            preexec_fn=functools.partial(end_with_owner, os.getpid()),
        )
    passed_on = 0
    try:
        while process.poll() is None:
            for number in list(received)[passed_on:]:
                process.send_signal(number if number == SAVE_SIGNAL else signal.SIGTERM)
                passed_on += 1
            time.sleep(POLL_SECONDS)
    finally:
        process.kill()
        process.wait()
    while SAVE_SIGNAL in received:
        received.remove(SAVE_SIGNAL)
    code = 1 if process.returncode < 0 else process.returncode
    if code not in (0, Interrupted.exit_code) and not received:
        write_atomically(cell.failure, f"{_error_in(cell.log, process.returncode)}\n")
    return code


def _error_in(log: Path, code: int) -> str:
    """Return the last error in a cell's log; how its process ended where there is none."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
        lines = stream.read().decode(errors="replace").splitlines()
    errors = [line.removeprefix(ERROR_MARK) for line in lines if line.startswith(ERROR_MARK)]
    if errors:
        return errors[-1]
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}; see {log}"


# -- as a Slurm array: one task for each cell, by the user's own script for a single run


def write_array(sweep: Sweep, script: Path) -> Path:
    """Write the configurations of all cells that are not complete, and the array's script; returns its path.

    Args:
        script: starts a single run from the arguments of `train`, as examples/slurm.sh does; its directives are each
            task's.

    Raises:
        InputError: it cannot be read or has no directives, or there is nothing left to run.
    """
    try:
        lines = regular_file(script, most_bytes=MOST_BYTES).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--slurm {script} cannot be read ({error}); name a script such as slurm.sh") from None
    directives = [number for number, line in enumerate(lines) if line.startswith(DIRECTIVE)]
    if not directives:
        raise InputError(f"--slurm {script} has no line {DIRECTIVE}; name a script such as slurm.sh")
    refuse_other_runs(sweep)
    cells = [cell for cell in sweep.cells if not is_complete(cell)]
    if not cells:
        raise InputError(f"all cells of {sweep.folder} are complete; use report")
    sweep.folder.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        write_configuration(cell)
    first, last = directives[0], directives[-1]
    array = [
        f"# The sweep {sweep.file}: a task for each cell that was not complete.",
        f"{DIRECTIVE} --array=0-{len(cells) - 1}",
    ]
    chosen = [
        "",
        "cells=(",
        *(f"    {shlex.quote(str(cell.file))}" for cell in cells),
        ")",
        'set -- --config "${cells[SLURM_ARRAY_TASK_ID]}" "$@"',
    ]
    written = [*lines[:first], *array, *lines[first : last + 1], *chosen, *lines[last + 1 :]]
    destination = sweep.folder / SCRIPT
    write_atomically(destination, "\n".join(written) + "\n")
    return destination
