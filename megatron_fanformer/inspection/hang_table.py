"""What a run's ranks were doing when it hung: what `inspect RUN --hang` prints."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from megatron_fanformer.errors import InputError, escaped
from megatron_fanformer.runtime import hang_report
from megatron_fanformer.runtime.hang_report import HANGS, RankReport
from megatron_fanformer.terminal import plural, some, table

SHOWN_FRAMES = 6  # of a rank's main thread; with --full all, of all threads
NCCL_ENTRIES = 3


def hang_folders(run: Path) -> list[Path]:
    """Return the folders of a run's hangs, in the order of their times.

    Raises:
        InputError: there is none.
    """
    folders = [path for path in (run / HANGS).glob("step-*") if any(path.glob("rank-*.json"))]
    if not folders:
        raise InputError(
            f"{run} has no report of a hang in {HANGS}/; a run of several ranks writes one when it is ended because "
            "a rank is silent or makes no progress"
        )
    return sorted(folders, key=lambda path: path.name.rpartition("-")[2])  # a later one may be of an earlier step


def as_object(folder: Path, reports: dict[int, RankReport]) -> dict[str, Any]:
    """Return a hang as `--json` prints it."""
    return {
        "folder": str(folder),
        "findings": hang_report.findings(reports),
        "ranks": {str(rank): msgspec.to_builtins(report) for rank, report in reports.items()},
    }


def lines(folder: Path, reports: dict[int, RankReport], width: int | None, *, full: bool) -> Iterator[str]:
    """Yield a hang as text for a terminal of that width (None: any); with `full` the stacks of all threads."""
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(max(report.at for report in reports.values())))
    yield f"{folder.name}: reports of {plural(len(reports), 'rank')}, at {at}"
    found = hang_report.findings(reports)
    for line in found or ["all ranks have entered the same collectives; none is missing from one"]:
        yield f"- {escaped(line)}"
    yield ""
    labels = {group.name: group.label for report in reports.values() for group in report.groups}
    rows = []
    for name, label in labels.items():
        members = {rank: group for rank, report in reports.items() for group in report.groups if group.name == name}
        counts = [group.count for group in members.values()]
        ranks = next(iter(members.values())).ranks
        behind = [rank for rank in ranks if rank in reports and _count(members.get(rank)) < max(counts)]
        shown = hang_report.ranks_in_words(behind) if behind else ""
        rows.append([escaped(label), some(map(str, ranks)), str(max(counts)), shown])
    yield from table(["group", "its ranks", "entered", "behind"], rows, align="llrl", width=width)
    for rank, report in reports.items():
        yield ""
        yield f"rank {rank} on {escaped(report.host)}, {escaped(report.place)}"
        for entry in report.nccl if full else report.nccl[:NCCL_ENTRIES]:
            yield f"  NCCL: {escaped(entry.kind)} {entry.number} of {escaped(entry.group)} is {escaped(entry.state)}"
        for thread in report.threads if full else report.threads[:1]:
            yield f"  {escaped(thread.name)}, innermost call first"
            for frame in thread.frames if full else thread.frames[:SHOWN_FRAMES]:
                yield f"    {escaped(str(frame))}"
            if not full and len(thread.frames) > SHOWN_FRAMES:
                yield f"    … {plural(len(thread.frames) - SHOWN_FRAMES, 'more call')}, which --full shows"


def _count(group: hang_report.Group | None) -> int:
    return 0 if group is None else group.count
