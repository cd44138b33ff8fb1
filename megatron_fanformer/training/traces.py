"""The traces of a run's profiled steps: where they are, and how their ranges are called; imports no torch."""

from pathlib import Path

from megatron_fanformer.checkpoint.store import TRACES, checkpoint_name

STEP, PHASE, WAIT = "step ", "phase ", "wait for a collective"
"""How the ranges of steps and of phases begin, and the name of that of waiting."""
TRACE_SUFFIX, MEMORY_SUFFIX = ".json.gz", ".memory.pickle"


def trace_folder(run: Path, first: int, last: int) -> Path:
    """Return the folder of the traces of some steps, which sorts by them."""
    return run / TRACES / f"{checkpoint_name(first)}-{last:08d}"


def trace_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's trace."""
    return folder / f"rank-{rank:05d}{TRACE_SUFFIX}"


def memory_file(trace: Path) -> Path:
    """Return the file of the snapshot of a GPU's memory beside a rank's trace."""
    return trace.with_name(trace.name.removesuffix(TRACE_SUFFIX) + MEMORY_SUFFIX)
