"""Beats of the ranks beside their collectives: a rank that is silent, or holds up the others, ends the run, named.

A collective waits for all of its ranks, and cannot say for which. So each rank has two threads of its own:

    beats    writes to the ranks' store, every second, what the rank is doing, and reads what it watches:
             rank 0 all ranks, all other ranks rank 0
    judge    never waits for anything; when the limit is exceeded, it ends the rank with one line (the launcher then
             ends the others)

A rank is *silent* if it no longer beats: its process is stopped, or its machine is gone. It is *stuck* if it beats, but
no rank makes progress: the one that is furthest behind is named, by how many steps it has begun, and how many marks it
has left since. Time in which this process was itself stopped does not count. It costs the training loop a few
assignments per report.

Before a silent or a stuck rank ends the run, all ranks that beat report what they are doing (`hang_report.py`): rank 0
requests it in its beat, and the others note in theirs that they have done it.
"""

import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_fanformer.errors import FanformerError, Interrupted
from megatron_fanformer.runtime import device as devices
from megatron_fanformer.runtime import hang_report
from megatron_fanformer.runtime.launch import CLOSING_SECONDS, PeerFailed, end_now, print_end

MAIN_RANK = 0
BEAT_SECONDS = 1.0
BEATS_PER_SECOND = 1000  # of all ranks together: a store serves ten times as many
LEAST_SECONDS = 120.0
STEPS_WITHIN_LIMIT, STEPS_SEEN = 10, 20  # the limit is ten times the longest of the last twenty steps
START_SECONDS = 600.0  # silence until a step was taken: building sample indices holds up a process's other threads
LONG_SECONDS = 3600.0  # without progress outside steps: loading, compiling, saving
FAILURE_SECONDS = 10.0  # a rank that failed ends the others through the collective that all of them are in, mostly
REPORT_SECONDS = 20.0  # at most, for writing the report of a hang, for the other ranks' and for reading them
REMEDY = "check that machine, and run the same command to continue from the last checkpoint"
LATE_BEATS = 3  # a rank that has not beaten for so many is late

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Activity:
    """The current activity of this rank. The training loop writes it, and the threads read it."""

    step: int = 0
    doing: str = "starting"
    in_step: bool = False
    """Whether it is in the part of a step whose time is measured."""
    is_closing: bool = False
    """Whether its run is over, and it writes what it alone has: it waits for no other rank."""
    progress: int = 0
    """A counter that grows with every report."""
    begun: int = 0
    """Steps that this process has begun, those that it went back over too."""
    marks: int = 0
    """Marks of those that all ranks leave, since the step began: who has fewer is behind."""
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_SEEN))

    def limit(self, stated_seconds: float | None) -> float:
        """Return seconds that another rank may be silent."""
        adapted = max(LEAST_SECONDS, STEPS_WITHIN_LIMIT * max(self.step_seconds, default=0.0))
        limit = adapted if stated_seconds is None else stated_seconds
        return limit if self.step_seconds else max(limit, START_SECONDS)


_activity = Activity()


def mark(doing: str, *, step: int | None = None, in_step: bool = True, by_all: bool = True) -> None:
    """Note what this rank begins to do, in the step noted last; costs a few assignments.

    Args:
        step: the step that begins with it; all ranks begin the same ones.
        by_all: whether every rank leaves this mark in the step: the one with the fewest of these is furthest behind.
    """
    _activity.doing, _activity.in_step = doing, in_step
    if step is not None:
        _activity.step, _activity.begun, _activity.marks = step, _activity.begun + 1, 0
        _activity.is_closing = False
    mark_progress(by_all=by_all)


def mark_progress(*, by_all: bool = False) -> None:
    """Note that this rank still makes progress with what it noted last; `by_all` as in `mark`."""
    _activity.progress += 1
    _activity.marks += by_all


def mark_closing() -> None:
    """Note that this rank's run is over, so that the others may have ended when it has closed what it has open."""
    mark("closing", in_step=False)
    _activity.is_closing = True


def mark_step_took(seconds: float) -> None:
    """Note how long a step took, which the limit follows."""
    _activity.step_seconds.append(seconds)


@dataclass(frozen=True, kw_only=True)
class _Beat:
    number: int
    host: str
    step: int
    doing: str
    in_step: bool
    progress: int
    begun: int
    marks: int
    at: float
    """Seconds since 1970, by its own clock."""
    report: str | None = None
    """The report of a hang that the main rank has begun, or another has written."""
    end: tuple[int, str] | None = None
    """Exit code and message of its end; None while it runs."""

    @property
    def place(self) -> str:
        return f"in step {self.step}, {self.doing}" if self.step else self.doing

    @property
    def reached(self) -> tuple[int, int]:
        """How far it is, to be compared with other ranks."""
        return self.begun, self.marks


@dataclass(kw_only=True)
class _Seen:
    """The last beat that was seen of a rank; the times are this process's own waking time, in seconds."""

    text: bytes
    """The progress and the beat as JSON: with thousands of ranks, only the late ones are parsed further."""
    changed: float
    progressed: float

    @property
    def progress(self) -> bytes:
        return self.text.partition(b" ")[0]

    @property
    def beat(self) -> _Beat:
        return _Beat(**json.loads(self.text.partition(b" ")[2]))


class Heartbeat:
    """This rank's beats and its watch over others.

    Args:
        store: a client of the ranks' store that nothing else uses.
        address: where the store is, for messages.
        limit_seconds: how long a rank may be silent; None: by the time that steps take.
        end: is called with the error that ends this rank.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        world_size: int,
        *,
        address: str,
        limit_seconds: float | None,
        activity: Activity = _activity,
        end: Callable[[FanformerError], Any] = end_now,
    ) -> None:
        self._store, self._rank, self._world_size, self._address = store, rank, world_size, address
        self._activity, self._end = activity, end
        self._watched = [other for other in range(world_size) if other != rank] if rank == MAIN_RANK else [MAIN_RANK]
        self._stated = limit_seconds
        limit = LEAST_SECONDS if limit_seconds is None else limit_seconds
        self._interval = min(max(BEAT_SECONDS, world_size / BEATS_PER_SECOND), limit / 4)
        self._host = socket.gethostname()
        self._number = 0
        self._ending: tuple[int, str] | None = None
        self._report: str | None = None
        # All in seconds that this process was awake: if it was stopped, the others may have been, too.
        self._awake, self._judged = 0.0, time.monotonic()
        self._answered = 0.0  # by the store
        self._progress, self._progressed = -1, 0.0  # of this rank
        self._seen: dict[int, _Seen] = {}
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"heartbeat-{work.__name__}", daemon=True)
            for work in (self._beats, self._judge)
        ]

    def start(self) -> None:
        """Begin to beat and to watch."""
        self.beat()
        for thread in self._threads:
            thread.start()

    def stop(self, code: int, message: str = "") -> None:
        """Stop both, and leave word of how this rank ended."""
        self._ending = (code, message)
        self._over.set()
        self._threads[0].join(2 * self._interval)  # longer only if the store does not answer

    def wait_until_read(self) -> None:
        """Wait after `stop` until the others have read it: the store may end with this process."""
        time.sleep((LATE_BEATS + 2) * self._interval if self._rank == MAIN_RANK else 0.0)

    # -- the thread `beats`, which may wait for the store for ever

    def _beats(self) -> None:
        is_over = False
        while not is_over:
            is_over = self._over.wait(self._interval)
            try:
                self.beat()
                self.look()
            except RuntimeError as error:  # torch's for a store that is gone: it does not answer
                logger.debug("the store of the ranks: %s", error)

    def beat(self) -> None:
        """Write what this rank is doing."""
        self._number += 1
        beat = self._own_beat()
        self._store.set(f"beat-{self._rank}", f"{beat.progress} {json.dumps(asdict(beat))}")

    def _own_beat(self) -> _Beat:
        now = self._activity
        return _Beat(
            number=self._number,
            host=self._host,
            step=now.step,
            doing=now.doing,
            in_step=now.in_step,
            progress=now.progress,
            begun=now.begun,
            marks=now.marks,
            at=time.time(),
            report=self._report,
            end=self._ending,
        )

    def look(self) -> None:
        """Read what the watched ranks are doing."""
        names = [f"beat-{rank}" for rank in self._watched]
        if self._seen or self._store.check(names):  # else reading would wait for those that are not there yet
            self._take(self._store.multi_get(names))
        self._answered = self._awake

    def _take(self, texts: list[bytes]) -> None:
        if not self._seen:  # all at once: the other thread goes through it
            self._seen = {
                rank: _Seen(text=text, changed=self._awake, progressed=self._awake)
                for rank, text in zip(self._watched, texts, strict=True)
            }
        for seen, text in zip(self._seen.values(), texts, strict=True):
            if text != seen.text:  # beats are numbered
                progress, seen.text, seen.changed = seen.progress, text, self._awake
                if seen.progress != progress:
                    seen.progressed = self._awake

    # -- the thread `judge`

    def _judge(self) -> None:
        while not self._over.wait(self._interval / 2):
            error = self.judge(time.monotonic())
            if error is None:
                self._report_if_requested()
            elif not self._over.is_set():
                if isinstance(error, RankHangs):
                    error = self._reported(error)
                if self._over.is_set():  # it was slow, and is done
                    return
                self.stop(error.exit_code, str(error))
                if error.already_reported:
                    self.wait_until_read()
                self._end(error)

    def _report_if_requested(self) -> None:
        """Write this rank's report of the hang that the main one has found."""
        main = self._seen.get(MAIN_RANK)
        if main is not None and hang_report.is_reported():
            name = main.beat.report
            if name is not None and name != self._report:
                self._write_report(name)
                self._report = name

    def _reported(self, error: "RankHangs") -> "RankHangs":
        """Report a hang that this rank has found, with the others if it is the main one; returns what is known then."""
        if not hang_report.is_reported():
            return error
        # Those that find the main rank silent know nothing of each other, and all have seen its last beat.
        found_by = self._own_beat() if self._rank == MAIN_RANK else self._seen[MAIN_RANK].beat
        self._report = name = hang_report.report_name(found_by.step, found_by.at)
        self._write_report(name)
        if self._rank == MAIN_RANK:
            end = time.monotonic() + REPORT_SECONDS
            while time.monotonic() < end and not self._have_reported(name):
                time.sleep(self._interval / 4)
        elif self._world_size > 2:  # the others find it within about two intervals of each other, and are to be read
            self._over.wait(min(REPORT_SECONDS, LATE_BEATS * self._interval))
        return error.with_findings(name)

    def _have_reported(self, name: str) -> bool:
        """Return whether all ranks have reported a hang that can."""
        silent = self._late(LATE_BEATS * self._interval)
        beats = (seen.beat for rank, seen in self._seen.items() if rank not in silent)
        return all(beat.report == name or beat.end is not None for beat in beats)

    def _write_report(self, name: str) -> None:
        now = self._activity
        hang_report.write_report(
            name,
            rank=self._rank,
            world_size=self._world_size,
            step=now.step,
            doing=now.doing,
            seconds=REPORT_SECONDS,
        )

    def judge(self, now: float) -> FanformerError | None:
        """Return what is wrong with another rank, if anything is, at a time in seconds."""
        self._awake += min(now - self._judged, 2 * self._interval)
        self._judged = now
        if self._activity.progress != self._progress:
            self._progress, self._progressed = self._activity.progress, self._awake
        idle = self._awake - self._progressed
        limit = self._activity.limit(self._stated)
        unanswered = self._awake - self._answered
        if unanswered > limit and idle > limit:  # if it makes progress, it needs no store
            return PeerFailed(
                f"the store of the ranks at {self._address} has not answered for {unanswered:.0f} s; {REMEDY}"
            )
        if unanswered > LATE_BEATS * self._interval or not self._seen:
            return None
        return self._failed() or self._silent(limit) or (self._stuck(limit, idle) if self._rank == MAIN_RANK else None)

    def _failed(self) -> FanformerError | None:
        # Until a step is over there may be no such collective: a rank that a signal ended is just gone.
        after = FAILURE_SECONDS if self._activity.step_seconds else min(FAILURE_SECONDS, LATE_BEATS * self._interval)
        is_closing = self._activity.is_closing
        after = CLOSING_SECONDS if is_closing else after  # this one waits for nobody
        for seen in self._late(after).values():
            end = seen.beat.end
            if end is not None and end[0]:
                error = PeerFailed(end[1])  # which names the rank
                error.exit_code = end[0]
                # What all ranks raise, as after a signal, rank 0 alone reports: it has not if it is still closing.
                is_to_report = end[0] == Interrupted.exit_code or is_closing
                error.already_reported = self._rank != MAIN_RANK or not is_to_report
                return error
        return None

    def _late(self, limit: float) -> dict[int, _Seen]:
        """Return the ranks that have not beaten for longer than that, whether they are silent or have ended."""
        return {rank: seen for rank, seen in self._seen.items() if self._awake - seen.changed > limit}

    def _silent(self, limit: float) -> FanformerError | None:
        silent = {rank: seen for rank, seen in self._late(limit).items() if seen.beat.end is None}
        if not silent:
            return None
        rank = min(silent, key=lambda rank: silent[rank].changed)
        beat, seconds = silent[rank].beat, self._awake - silent[rank].changed
        have = f" and {len(silent) - 1} other ranks have" if len(silent) > 1 else " has"
        return RankHangs(
            f"rank {rank} on {beat.host}{have} been silent for {seconds:.0f} s, last seen {beat.place}; {REMEDY}"
        )

    def _stuck(self, limit: float, idle: float) -> FanformerError | None:
        waited = min([idle, *(self._awake - seen.progressed for seen in self._seen.values())])
        if waited <= limit or any(seen.beat.end is None for seen in self._late(LATE_BEATS * self._interval).values()):
            return None  # in the latter case one is about to be called silent
        others = {rank: beat for rank, seen in self._seen.items() if (beat := seen.beat).end is None}
        now = self._activity
        is_measured = now.in_step and now.step_seconds and all(beat.in_step for beat in others.values())
        if not others or not (is_measured or waited > LONG_SECONDS):
            return None
        rank = min(others, key=lambda rank: others[rank].reached)
        beat, own = others[rank], self._own_beat()
        if beat.reached < own.reached:
            return RankHangs(
                f"rank {rank} on {beat.host} has made no progress for {waited:.0f} s, {beat.place}, "
                f"and others wait for it; {REMEDY}"
            )
        return RankHangs(  # this one holds up the others, or all are equally far
            f"no rank has made progress for {waited:.0f} s, rank {self._rank} on {own.host} is {own.place}; {REMEDY}"
        )


class RankHangs(PeerFailed):
    """A rank is silent, or holds up the others; the message ends in REMEDY."""

    def with_findings(self, report: str) -> "RankHangs":
        """Return the error with what the ranks' reports say."""
        return RankHangs(f"{str(self).removesuffix(REMEDY)}{hang_report.clause(report, REPORT_SECONDS)}{REMEDY}")


@contextmanager
def watching_ranks(
    store: Any, rank: int, world_size: int, *, address: str, limit_seconds: float | None
) -> Iterator[None]:
    """Beat and watch the other ranks during all that this rank does; does nothing with one rank."""
    if world_size == 1:
        yield
        return
    beats = Heartbeat(store, rank, world_size, address=address, limit_seconds=limit_seconds)
    beats.start()
    _beating.append(beats)
    try:
        yield
    except BaseException as error:
        beats.stop(getattr(error, "exit_code", 1), f"rank {rank}: {error}")
        raise
    finally:
        _beating.clear()
    beats.stop(0)


_beating: list[Heartbeat] = []
"""The heartbeat of this process, while it is among ranks."""


def report_stopped(message: str) -> None:
    """Report to the user, and to the other ranks, which end too, that a signal ends this process between steps."""
    stopped = Interrupted(message)
    stopped.already_reported = devices.rank_number() != MAIN_RANK  # a launcher sends it to all
    print_end(stopped)
    for beats in _beating:
        beats.stop(stopped.exit_code, message)
        beats.wait_until_read()
