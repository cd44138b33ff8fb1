"""The report of a hang: what each rank was doing when the heartbeat gave up, and which of them the others wait for.

Each rank writes a file: the Python stacks of its threads, the last collectives that it has entered by group, and over
NCCL the entries of its flight recorder that are not complete. A rank whose process is stopped writes none. They are
read as data, by rank 0 for the line that ends the run, and by `inspect RUN --hang`. Imports no torch: reading needs
none.
"""

import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NamedTuple

import msgspec

from megatron_fanformer.durable_files import regular_file, write_atomically
from megatron_fanformer.errors import CorruptError

HANGS = "hangs"
"""The folder of the reports in a run's folder: a folder for each hang, with a file for each rank."""
MOST_BYTES = 64 << 20
MOST_FRAMES = 200
MOST_RANKS = 1 << 20
MAIN_THREAD = "MainThread"  # as Python names it
WAITING_FILES = ("runtime/last_collectives.py",)
SHOWN_FINDINGS = 2  # on the line that ends the run
PACKAGE = Path(__file__).resolve().parents[1]
ENTERED_ALIKE = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "barrier")
"""The kinds whose messages are as large on every rank."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""Since 1970, within what a calendar has."""

logger = logging.getLogger(__name__)

_folder: Path | None = None


@contextmanager
def reporting_hangs(run: Path) -> Iterator[None]:
    """Have a hang of the ranks within the block reported in a run's folder."""
    global _folder
    before, _folder = _folder, run / HANGS
    try:
        yield
    finally:
        _folder = before


def report_name(step: int, at: float) -> str:
    """Return the name of a hang's folder: the step and the time, which sort."""
    return f"step-{step:08d}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(at))}"


def is_reported() -> bool:
    """Return whether hangs of this process's ranks are to be reported."""
    return _folder is not None


# -- what a rank writes


class Frame(msgspec.Struct, frozen=True):
    """A call in progress."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def is_ours(self) -> bool:
        """Whether it is in this package, and not in what waits for other ranks on behalf of others."""
        return self.file.startswith(f"{PACKAGE.name}/") and not self.file.endswith(WAITING_FILES)


class Thread(msgspec.Struct, frozen=True):
    """A thread and its calls, the innermost first."""

    name: str
    frames: list[Frame]


class EnteredCollective(msgspec.Struct, frozen=True):
    """A collective that a rank has entered: its number in the group, from 1, and its time in seconds since 1970."""

    number: int
    kind: str
    message_bytes: int
    at: Seconds


class Group(msgspec.Struct, frozen=True):
    """A group of ranks, and what a rank has entered of it."""

    name: str
    label: str
    ranks: list[int]
    count: int
    last: list[EnteredCollective]


class NCCLEntry(msgspec.Struct, frozen=True):
    """An entry of NCCL's flight recorder that is not complete."""

    group: str
    number: int
    kind: str
    state: str
    """`scheduled`: the GPU has not come to it; `started`: it waits for other ranks in it, or moves bytes."""


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank was doing."""

    rank: int
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    host: str
    pid: int
    at: Seconds
    step: int
    doing: str
    threads: list[Thread]
    groups: list[Group]
    nccl: list[NCCLEntry] = []

    @property
    def frame(self) -> Frame | None:
        """The innermost call of this package in the main thread."""
        main = next((thread for thread in self.threads if thread.name == MAIN_THREAD), None)
        return None if main is None else next((frame for frame in main.frames if frame.is_ours), None)

    @property
    def place(self) -> str:
        """Where it is, in words."""
        doing = f"in step {self.step}, {self.doing}" if self.step else self.doing
        return doing if self.frame is None else f"{doing}, {self.frame}"


def write_report(name: str, *, rank: int, world_size: int, step: int, doing: str, seconds: float) -> None:
    """Write this rank's report of a hang; gives up after some seconds, for a file system may be what hangs.

    Args:
        name: the hang's folder, by `report_name`.
    """
    if _folder is None:
        return
    file = report_file(_folder / name, rank)

    def write() -> None:
        report = RankReport(
            rank=rank,
            world_size=world_size,
            host=socket.gethostname(),
            pid=os.getpid(),
            at=time.time(),
            step=step,
            doing=doing,
            threads=_threads(),
            groups=_groups(),
        )
        _write(file, report)
        if entries := _nccl_entries(2 * seconds):
            _write(file, msgspec.structs.replace(report, nccl=entries))

    within(seconds, write)


def within(seconds: float, work: Callable[[], None]) -> None:
    """Do some work in a thread, and wait for it so long at most."""
    done = threading.Thread(target=work, name="hang-report", daemon=True)
    done.start()
    done.join(seconds)


def report_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's report."""
    return folder / f"rank-{rank:05d}.json"


def _write(file: Path, report: RankReport) -> None:
    try:
        for folder in (file.parent.parent, file.parent):  # never the run's own, which somebody may have removed
            folder.mkdir(exist_ok=True)
        write_atomically(file, msgspec.json.format(msgspec.json.encode(report), indent=1))
    except OSError as error:  # the run ends all the same, and its line says why
        logger.warning("the report of the hang, %s, cannot be written: %s", file, error)


def _threads() -> list[Thread]:
    """Return the stacks of this process's threads, the main one first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    stacks = sorted(sys._current_frames().items(), key=lambda each: (each[0] != main, each[0]))
    own = threading.get_ident()
    return [Thread(names.get(ident, str(ident)), list(_frames(frame))) for ident, frame in stacks if ident != own]


def _frames(frame: FrameType | None) -> Iterator[Frame]:
    for _ in range(MOST_FRAMES):
        if frame is None:
            return
        path = frame.f_code.co_filename
        if path.startswith(f"{PACKAGE}/"):
            path = path.removeprefix(f"{PACKAGE.parent}/")
        else:
            path = path.rpartition("/site-packages/")[2]
        yield Frame(
            path, frame.f_lineno or 0, getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
        )  # from 3.11 on
        frame = frame.f_back


def _groups() -> list[Group]:
    from megatron_fanformer.runtime import last_collectives  # imports torch, which a rank has

    return [
        Group(
            record.name,
            record.label,
            list(record.ranks),
            record.count,
            [EnteredCollective(*entered) for entered in list(record.last)],
        )
        for record in last_collectives.records()
        if len(record.ranks) > 1
    ]


def _nccl_entries(seconds: float) -> list[NCCLEntry]:
    """Return the entries of NCCL's flight recorder that are not complete; none without NCCL.

    It looks at the GPU's events, and a driver that hangs may keep it from returning, and this process from running any
    Python: then the process ends after those seconds.
    """
    import torch._C._distributed_c10d as c10d

    dump = getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        return []
    with open(os.devnull, "w") as nowhere:
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
        try:
            return incomplete_entries(dump(True, True))
        finally:
            faulthandler.cancel_dump_traceback_later()


def incomplete_entries(content: bytes) -> list[NCCLEntry]:
    """Return the entries that are not complete of a dump of NCCL's flight recorder, as torch writes it."""
    try:
        entries = json.loads(content).get("entries", [])
        return [
            NCCLEntry(
                " ".join(map(str, entry["process_group"])),
                int(entry["collective_seq_id"]),
                str(entry["profiling_name"]),
                str(entry["state"]),
            )
            for entry in entries
            if entry["state"] != "completed"
        ]
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # of a later torch
        logger.warning("NCCL's flight recorder cannot be read: %s: %s", type(error).__name__, error)
        return []


# -- what they say together


class Missing(NamedTuple):
    """A collective that some ranks of a group have entered, and others have not."""

    label: str
    kind: str
    number: int
    waiting: list[int]
    missing: list[int]
    """Of those that have written a report."""
    since: float
    """When the first of them entered it, in seconds since 1970."""


class Mismatch(NamedTuple):
    """A number in a group at which ranks have entered different collectives."""

    label: str
    number: int
    entered: dict[int, str]
    """What each rank has."""


def read_reports(folder: Path) -> dict[int, RankReport]:
    """Return the reports of a hang by rank.

    Raises:
        CorruptError: one cannot be read.
    """
    reports = {}
    for file in sorted(folder.glob("rank-*.json")):
        try:
            report = msgspec.json.decode(regular_file(file, most_bytes=MOST_BYTES).read_bytes(), type=RankReport)
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CorruptError(f"{file} is not a rank's report of a hang ({reason}); remove it") from None
        reports[report.rank] = report
    return reports


def missing_ranks(reports: dict[int, RankReport]) -> list[Missing]:
    """Return what ranks wait for, first what ranks are missing from that wait for nobody themselves, then by time."""
    found = []
    for members in _by_group(reports):
        least = min(group.count for group in members.values())
        waiting = {rank: group for rank, group in members.items() if group.count > least}
        # The next one, unless it lies further back than what is remembered.
        entries = [entry for group in waiting.values() for entry in group.last if entry.number > least]
        if entries:
            first = min(entries, key=lambda entry: (entry.number, entry.at))
            behind = [rank for rank, group in members.items() if group.count == least]
            label = next(iter(members.values())).label
            found.append(Missing(label, first.kind, first.number, list(waiting), behind, first.at))
    waiting_ranks = {rank for each in found for rank in each.waiting}
    found.sort(key=lambda each: (waiting_ranks.issuperset(each.missing), each.since))
    # Ranks that wait for others in one collective have begun further ones with them: messages both ways, for example.
    kept: dict[tuple[Any, Any], Missing] = {}
    for each in found:
        kept.setdefault((tuple(each.waiting), tuple(each.missing)), each)
    return list(kept.values())


def mismatches(reports: dict[int, RankReport]) -> list[Mismatch]:
    """Return where ranks of a group have entered different collectives under one number: one has skipped one."""
    found = []
    for members in _by_group(reports):
        last = {rank: {entry.number: entry for entry in group.last} for rank, group in members.items()}
        for number in sorted(set.intersection(*map(set, last.values()))) if last else []:
            entered = {rank: _in_words(entries[number]) for rank, entries in last.items()}
            if len(set(entered.values())) > 1:
                found.append(Mismatch(next(iter(members.values())).label, number, entered))
                break
    return found


def _in_words(entry: EnteredCollective) -> str:
    return f"{entry.kind} of {entry.message_bytes:,} bytes" if entry.kind in ENTERED_ALIKE else entry.kind


def _by_group(reports: dict[int, RankReport]) -> Iterator[dict[int, Group]]:
    """Yield each group's part of the reports, by rank; a rank that has entered nothing of it has a count of 0."""
    groups: dict[str, dict[int, Group]] = {}
    for rank, report in reports.items():
        for group in report.groups:
            groups.setdefault(group.name, {})[rank] = group
    for members in groups.values():
        any_one = next(iter(members.values()))
        absent = {rank: msgspec.structs.replace(any_one, count=0, last=[]) for rank in any_one.ranks if rank in reports}
        yield dict(sorted({**absent, **members}.items()))


def clause(name: str, seconds: float) -> str:
    """Return what a hang's reports say, as a clause of the line that ends the run; nothing if there are none.

    Args:
        seconds: how long reading them may take.
    """
    assert _folder is not None
    folder = _folder / name
    found: list[str] = []

    def read() -> None:
        try:
            reports = read_reports(folder)
        except CorruptError as error:
            logger.warning("%s", error)
            return
        if reports:
            found.extend([*findings(reports)[:SHOWN_FINDINGS], f"`inspect {folder.parents[1]} --hang` has the stacks"])

    within(seconds, read)
    return "".join(f"{line}; " for line in found)


def ranks_in_words(ranks: list[int]) -> str:
    """Return `rank 3`, `ranks 0 to 2, 5`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    texts = [str(span[0]) if len(span) == 1 else f"{span[0]} to {span[-1]}" for span in spans]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"


def findings(reports: dict[int, RankReport]) -> list[str]:
    """Return what the reports say of who waits for whom, the most telling first."""
    lines = []
    if reports:
        world_size = next(iter(reports.values())).world_size
        if silent := [rank for rank in range(world_size) if rank not in reports]:
            has, its = ("has", "its process is") if len(silent) == 1 else ("have", "their processes are")
            lines.append(f"{ranks_in_words(silent)} {has} written no report: {its} stopped or gone, or cannot write")
    for each in mismatches(reports):
        ranks: dict[str, list[int]] = {}
        for rank, entered in each.entered.items():
            ranks.setdefault(entered, []).append(rank)
        texts = [f"{entered} on {ranks_in_words(of)}" for entered, of in ranks.items()]
        lines.append(f"collective {each.number} of {each.label} differs, {', '.join(texts)}: one of them skipped one")
    for wait in missing_ranks(reports):
        since = time.strftime("%H:%M:%S UTC", time.gmtime(wait.since))
        one = len(wait.missing) == 1
        first = reports[wait.missing[0]]
        lines.append(
            f"{ranks_in_words(wait.waiting)} {'waits' if len(wait.waiting) == 1 else 'wait'} in {wait.kind} "
            f"{wait.number} of {wait.label} since {since}, which {ranks_in_words(wait.missing)} "
            f"{'has' if one else 'have'} not entered: {'it' if one else f'rank {first.rank}'} is {first.place}"
        )
    return lines
