"""The watch of ranks over one another, in a time that the tests tell; stopped processes are in tests/faults."""

import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from torch import distributed as dist

from megatron_fanformer.runtime import heartbeat
from megatron_fanformer.runtime.heartbeat import (
    LEAST_SECONDS,
    LONG_SECONDS,
    START_SECONDS,
    Activity,
    Heartbeat,
)
from megatron_fanformer.runtime.launch import CLOSING_SECONDS
from tests.patience import PATIENCE_SECONDS, wait_until

LIMIT = 20.0
BEFORE = LIMIT - 5
AFTER = LIMIT + 5  # when a run must have ended


class Ranks:
    """The heartbeats of some ranks in this process, without their threads."""

    def __init__(self, number: int, limit_seconds: float | None = LIMIT, **activity: Any) -> None:
        self.store = dist.HashStore()
        self.activities = [Activity(**{"step": 12, "in_step": True, **activity}) for _ in range(number)]
        self.beats = [
            Heartbeat(self.store, rank, number, address="node-0:1", limit_seconds=limit_seconds, activity=activity)
            for rank, activity in enumerate(self.activities)
        ]
        for activity in self.activities:
            activity.step_seconds.append(0.5)
        for beats in self.beats:
            beats._host = f"node-{beats._rank}"
            beats.beat()
        self.now = time.monotonic()

    def mark(self, rank: int, doing: str, **options: Any) -> None:
        """Leave a mark as a rank."""
        with mock.patch.object(heartbeat, "_activity", self.activities[rank]):
            heartbeat.mark(doing, **options)

    def live(self, seconds: float, *, silent: tuple[int, ...] = (), stuck: tuple[int, ...] = ()) -> dict[int, str]:
        """Let time pass; what the ranks that are not silent say first, by rank.

        Args:
            silent: ranks that do nothing.
            stuck: ranks that beat, but make no progress.
        """
        errors: dict[int, str] = {}
        end = self.now + seconds
        while self.now < end:
            self.now += 1
            awake = [rank for rank in range(len(self.beats)) if rank not in silent]
            for rank in awake:
                if rank not in stuck:
                    self.mark(rank, self.activities[rank].doing, in_step=self.activities[rank].in_step)
                self.beats[rank].beat()
            for rank in awake:
                self.beats[rank].look()
                if rank not in errors and (error := self.beats[rank].judge(self.now)) is not None:
                    errors[rank] = str(error)
        return errors


@pytest.mark.parametrize(("silent", "tellers"), [(1, [0]), (0, [1, 2])])
def test_a_silent_rank_is_named_within_the_limit(silent: int, tellers: list[int]) -> None:
    ranks = Ranks(3)
    assert ranks.live(BEFORE) == {}
    ranks.activities[silent].doing = "backward"
    ranks.live(1)
    assert ranks.live(BEFORE, silent=(silent,), stuck=(0, 1, 2)) == {}
    errors = ranks.live(AFTER - BEFORE, silent=(silent,), stuck=(0, 1, 2))
    assert sorted(errors) == tellers
    for line in errors.values():
        assert line.startswith(f"rank {silent} on node-{silent} has been silent for 2")
        assert "last seen in step 12, backward; " in line


def test_a_rank_that_goes_on_in_time_is_left_alone() -> None:
    ranks = Ranks(2)
    for _ in range(3):
        assert ranks.live(BEFORE, silent=(1,), stuck=(0,)) == {}
        assert ranks.live(2) == {}


def test_the_rank_that_holds_up_the_others_is_named() -> None:
    ranks = Ranks(3)
    ranks.activities[2].doing = "loading samples"
    ranks.live(2, stuck=(2,))
    errors = ranks.live(AFTER, stuck=(0, 1, 2))
    assert list(errors) == [0]
    assert errors[0].startswith("rank 2 on node-2 has made no progress for 2")
    assert "s, in step 12, loading samples, and others wait for it; " in errors[0]


def test_what_one_rank_alone_does_does_not_put_it_ahead() -> None:
    """A profile that it writes, files that it copies; and all that an earlier step had of it."""
    ranks = Ranks(3)
    for _ in range(100):
        ranks.mark(0, "writing a profile", in_step=False, by_all=False)
    for rank in range(3):
        ranks.mark(rank, "forward")
    assert ranks.live(AFTER, stuck=(0, 1, 2))[0].startswith("no rank has made progress for 2")
    ranks = Ranks(3)
    for _ in range(100):
        ranks.mark(0, "something new that is marked on one rank")
    for rank in range(3):
        ranks.mark(rank, "learning rate", step=13)
        ranks.mark(rank, "backward")
    error = ranks.live(AFTER, stuck=(0, 1, 2))[0]
    assert "no rank has made progress" in error and "rank 0 on node-0 is in step 13, backward; " in error


def test_a_rank_that_has_not_gone_back_with_the_others_is_behind() -> None:
    """Though its step has the higher number, and more marks."""
    ranks = Ranks(3)
    ranks.live(5)
    for rank in (0, 2):
        ranks.mark(rank, "learning rate", step=10)
    ranks.live(5, stuck=(0, 1, 2))
    error = ranks.live(AFTER, stuck=(0, 1, 2))[0]
    assert error.startswith("rank 1 on node-1 has made no progress for 2") and "s, in step 12" in error


def test_a_save_may_take_its_time_but_no_silence() -> None:
    ranks = Ranks(2, in_step=False)
    assert ranks.live(10 * LIMIT, stuck=(0, 1)) == {}
    assert list(ranks.live(LONG_SECONDS, stuck=(0, 1))) == [0]
    assert list(Ranks(2, in_step=False).live(AFTER, silent=(1,), stuck=(0,))) == [0]


def test_a_watch_that_was_itself_stopped_blames_nobody() -> None:
    """All ranks of a suspended machine: the first to wake up sees no beats of the others yet."""
    ranks = Ranks(2)
    ranks.live(5)
    ranks.now += 100 * LIMIT
    assert ranks.beats[0].judge(ranks.now) is None
    assert ranks.live(BEFORE) == {}


def test_a_store_that_does_not_answer_ends_only_ranks_that_are_held_up() -> None:
    ranks = Ranks(2)
    ranks.live(5)
    for second in range(round(AFTER)):
        ranks.activities[0].progress += 1
        working, waiting = (beats.judge(ranks.now + second) for beats in ranks.beats)
        assert working is None
    assert waiting is not None and str(waiting).startswith("the store of the ranks at node-0:1 has not answered for 2")


def test_the_error_of_a_rank_reaches_all_others_by_the_main_one() -> None:
    """A rank of another machine does not notice it: over NCCL it waits for the end of its collective."""
    ranks = Ranks(3)
    ranks.live(2)
    ranks.beats[2]._ending = (3, "rank 2: a.bin is damaged")
    ranks.beats[2].beat()
    assert ranks.live(8, silent=(2,), stuck=(0, 1)) == {}  # where all raise it, they do so by themselves
    assert ranks.live(5, silent=(2,), stuck=(0, 1)) == {0: "rank 2: a.bin is damaged"}


def test_a_rank_that_a_signal_ended_before_the_first_step_ends_the_others_at_once() -> None:
    """Under Slurm they would otherwise be killed 100 s later, and the job would not be requeued."""
    ranks = Ranks(3)
    for activity in ranks.activities:
        activity.step_seconds.clear()
    ranks.live(2)
    ranks.beats[2]._ending = (5, "stopped on SIGUSR1")
    ranks.beats[2].beat()
    assert ranks.live(5, silent=(2,), stuck=(0, 1)) == {0: "stopped on SIGUSR1"}
    error = ranks.beats[0].judge(ranks.now)
    assert error is not None and (error.exit_code, error.already_reported) == (5, False)
    ranks.beats[0]._ending = (5, "stopped on SIGUSR1")
    ranks.beats[0].beat()
    assert ranks.live(5, silent=(0, 2), stuck=(1,)) == {1: "stopped on SIGUSR1"}
    error = ranks.beats[1].judge(ranks.now)
    assert error is not None and (error.exit_code, error.already_reported) == (5, True)


@pytest.mark.parametrize("code", [1, 5])
def test_a_rank_that_closes_what_it_alone_has_is_given_time_and_then_says_why(code: int) -> None:
    """The others, which have raised the same, have ended by then: W&B may take a minute to send its last rows."""
    ranks = Ranks(3)
    ranks.live(2)
    with mock.patch.object(heartbeat, "_activity", ranks.activities[0]):
        heartbeat.mark_closing()
    for other in ranks.beats[1:]:
        other._ending = (code, "a.bin is damaged")
        other.beat()
    assert ranks.live(CLOSING_SECONDS - 5, silent=(1, 2), stuck=(0,)) == {}
    assert ranks.live(10, silent=(1, 2), stuck=(0,)) == {0: "a.bin is damaged"}
    error = ranks.beats[0].judge(ranks.now)
    assert error is not None and (error.exit_code, error.already_reported) == (code, False)


def test_the_first_beats_are_taken_all_at_once() -> None:
    """Or the judge's thread, which goes through them, would find that their number changes."""
    watching = Ranks(4).beats[0]
    seen: list[int] = []

    class Texts(list[bytes]):
        def __iter__(self) -> Iterator[bytes]:
            for text in super().__iter__():
                seen.append(len(watching._seen))
                yield text

    watching._take(Texts([b"1 {}", b"2 {}", b"3 {}"]))
    assert set(seen) == {0, 3} and [other.progress for other in watching._seen.values()] == [b"1", b"2", b"3"]


@pytest.mark.parametrize(
    ("stated", "steps", "limit"),
    [
        (None, [0.1] * 5, LEAST_SECONDS),
        (None, [900.0, 900.0], 9000.0),
        (None, [900.0] + [1.0] * 20, LEAST_SECONDS),  # the first one compiles
        (18.0, [900.0], 18.0),
        (18.0, [], START_SECONDS),
        (1e4, [], 1e4),
    ],
)
def test_the_limit_follows_the_steps_unless_it_is_stated(
    stated: float | None, steps: list[float], limit: float
) -> None:
    activity = Activity()
    activity.step_seconds.extend(steps)
    assert activity.limit(stated) == limit


def test_the_threads_end_with_the_run_and_leave_word() -> None:
    store, ended = dist.HashStore(), []
    beats = Heartbeat(store, 0, 2, address="a:1", limit_seconds=0.4, activity=Activity(), end=ended.append)
    beats.start()
    with mock.patch.object(heartbeat, "START_SECONDS", 0.4):
        store.set("beat-1", store.get("beat-0"))
        wait_until(lambda: ended)
    [error] = ended
    assert "rank 1" in str(error) and "silent" in str(error)
    for thread in beats._threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    assert b'"end": [1, "rank 1 on ' in store.get("beat-0")
