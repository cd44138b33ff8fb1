"""The table of where the time of profiled steps went, by rank: what `inspect RUN --trace` prints."""

import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_fanformer.checkpoint.store import TRACES
from megatron_fanformer.errors import InputError
from megatron_fanformer.inspection.trace import CATEGORIES, COMMUNICATION, HOST, RankTimes, rank_times
from megatron_fanformer.terminal import some, table
from megatron_fanformer.training.traces import TRACE_SUFFIX, trace_file

MOST_COLUMNS = 4  # ranks with a column of their own; of more, the least and the most
_RANK = re.compile(r"rank-(\d{5,9})" + re.escape(TRACE_SUFFIX))


def trace_folders(run: Path) -> list[Path]:
    """Return the folders of a run's traces, in the order of their steps.

    Raises:
        InputError: there is none.
    """
    folders = sorted(path for path in (run / TRACES).glob("step-*") if _files(path))
    if not folders:
        raise InputError(
            f"{run} has no profiled steps in {TRACES}/; set logging.profile_steps, or request a profile while it is "
            "running (docs/debugging.md#where-the-time-goes)"
        )
    return folders


def _files(folder: Path) -> dict[int, Path]:
    """Return the traces of some steps by their ranks."""
    found = {int(match[1]): file for file in folder.glob("rank-*") if (match := _RANK.fullmatch(file.name))}
    return dict(sorted(found.items()))


def times_by_rank(folder: Path) -> dict[int, RankTimes]:
    """Return where the time went by rank, by the traces of some steps.

    Raises:
        InputError, CorruptError: a trace cannot be read.
    """
    return {rank: rank_times(trace_file(folder, rank)) for rank in _files(folder)}


def as_object(folder: Path, times: Mapping[int, RankTimes]) -> dict[str, Any]:
    """Return the traces' times as `--json` prints them."""
    return {
        "folder": str(folder),
        "ranks": {
            str(rank): {
                "steps": list(each.steps),
                "device": "cuda" if each.on_gpu else "cpu",
                "step_seconds": each.step_seconds,
                "seconds": each.seconds,
                "communication_seconds": each.communication,
                "idle_seconds": each.idle,
                "gaps": [gap._asdict() for gap in each.gaps],
            }
            for rank, each in times.items()
        },
    }


def lines(folder: Path, times: Mapping[int, RankTimes], width: int | None) -> Iterator[str]:
    """Yield the table for a terminal of that width (None: any)."""
    first = next(iter(times.values()))
    device = "GPU" if first.on_gpu else "CPU"
    steps = f"steps {first.steps[0]} to {first.steps[-1]}" if len(first.steps) > 1 else f"step {first.steps[0]}"
    ranks = f"rank{'s' * (len(times) > 1)} {some(map(str, times))}"
    yield f"{steps} on {ranks} ({device}), milliseconds of a step, from {folder}"
    yield ""
    total = statistics.mean(each.step_seconds for each in times.values())
    shown = [name for name in CATEGORIES if any(name in each.seconds for each in times.values())]
    rows = []
    for name in shown:
        values = {rank: each.seconds.get(name, 0.0) for rank, each in times.items()}
        share = statistics.mean(values.values()) / total
        rows.append([_labels(first).get(name, name), f"{share:.1%}", *_cells(values)])
    rows.append(["whole step", f"{1:.1%}", *_cells({rank: each.step_seconds for rank, each in times.items()})])
    of_communication = {rank: each.communication for rank, each in times.items()}
    if any(of_communication.values()):
        share = statistics.mean(of_communication.values()) / total
        rows.append(["all communication", f"{share:.1%}", *_cells(of_communication)])
    columns = ["", "share", *_columns(times)]
    yield from table(columns, rows, align="l" + "r" * (len(columns) - 1), width=width)
    if first.on_gpu:
        yield ""
        idle = statistics.mean(each.idle for each in times.values()) / total
        yield f"without a kernel {idle:.1%} of the time; on rank {next(iter(times))} the most after"
        for gap in first.gaps:
            share = gap.seconds / first.step_seconds
            yield f"  {gap.after}, before {gap.before}: {share:.1%}, {gap.times:.0f} times a step"


def _labels(times: RankTimes) -> dict[str, str]:
    """Return what categories are called in the table, where it is not their name."""
    if times.on_gpu:
        return {COMMUNICATION: "communication, exposed", HOST: "host (no kernel runs)"}
    return {COMMUNICATION: "communication, exposed", HOST: "host (Python)"}


def _columns(times: Mapping[int, RankTimes]) -> list[str]:
    return [f"rank {rank}" for rank in times] if len(times) <= MOST_COLUMNS else ["mean", "least", "most"]


def _cells(values: Mapping[int, float]) -> list[str]:
    """Return a row's numbers in milliseconds, a rank each or of all."""
    if len(values) <= MOST_COLUMNS:
        return [f"{1000 * value:.2f}" for value in values.values()]
    least, most = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    mean = statistics.mean(values.values())
    ends = [f"{1000 * values[rank]:.2f} (rank {rank})" for rank in (least, most)]
    return [f"{1000 * mean:.2f}", *ends]
