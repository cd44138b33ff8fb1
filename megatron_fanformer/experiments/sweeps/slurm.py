"""A sweep as a Slurm array: one task for each cell, by the user's own script for a single run."""

import shlex
from pathlib import Path

from megatron_fanformer.durable_files import regular_file, write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.experiments.sweeps.cells import is_complete, refuse_other_runs
from megatron_fanformer.experiments.sweeps.file import Sweep
from megatron_fanformer.experiments.sweeps.run import write_configuration

SCRIPT = "array.sh"
MOST_BYTES = 1 << 20
DIRECTIVE = "#SBATCH"


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
