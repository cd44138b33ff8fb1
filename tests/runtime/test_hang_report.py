"""Who is missing from a collective: what ranks remember, what their reports say together, how all come to report."""

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist

from megatron_fanformer.cli import main
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.runtime import hang_report, heartbeat
from megatron_fanformer.runtime.hang_report import (
    EnteredCollective,
    Frame,
    Group,
    NCCLEntry,
    RankReport,
    Thread,
    findings,
    incomplete_entries,
    read_reports,
    report_file,
    reporting_hangs,
    write_report,
)
from megatron_fanformer.runtime.heartbeat import REMEDY, Activity, Heartbeat, RankHangs
from megatron_fanformer.runtime.last_collectives import records, remembering_collectives
from tests.patience import PATIENCE_SECONDS, wait_until

NOON = 1_795_694_400.0  # 2026-11-26 12:00:00 UTC
RunOnRanks = Callable[..., list[Any]]


def group(label: str, ranks: list[int], *kinds: str, at: float = 0.0, skipped: int = 0) -> Group:
    """A group in which collectives were entered a second after each other; `skipped` ones are not remembered."""
    entered = [EnteredCollective(skipped + n, kind, 8, NOON + at + n) for n, kind in enumerate(kinds, 1)]
    return Group(f"name of {label}", label, ranks, skipped + len(kinds), entered)


def report(rank: int, *groups: Group, world_size: int = 3, doing: str = "backward") -> RankReport:
    frames = [
        Frame("torch/distributed/distributed_c10d.py", 5, "all_reduce"),
        Frame("megatron_fanformer/runtime/last_collectives.py", 91, "GroupMemory.wait"),
        Frame("megatron_fanformer/training/step.py", 10 + rank, "take"),
        Frame("megatron_fanformer/training/trainer.py", 5, "train"),
    ]
    threads = [Thread("MainThread", frames), Thread("heartbeat", frames[:1])]
    values = {"host": f"node-{rank}", "pid": 1, "at": NOON + 60, "step": 12, "doing": doing}
    return RankReport(rank=rank, world_size=world_size, threads=threads, groups=list(groups), **values)


def report_lines(*reports: RankReport) -> list[str]:
    return findings({each.rank: each for each in reports})


def test_the_rank_that_waits_for_nobody_is_missing_before_those_that_wait_for_it() -> None:
    three = ["all-reduce", "all-gather", "all-reduce"]
    lines = report_lines(
        report(0, group("world", [0, 1, 2], *three), group("tp", [0, 1], "broadcast", "broadcast", at=-60)),
        report(1, group("world", [0, 1, 2], *three), group("tp", [0, 1], "broadcast", at=-60)),
        report(2, group("world", [0, 1, 2], *three[:1]), doing="loading samples"),
    )
    assert lines == [
        "ranks 0 to 1 wait in all-gather 2 of world since 12:00:02 UTC, which rank 2 has not entered: it is in step "
        "12, loading samples, megatron_fanformer/training/step.py:12 in take",
        "rank 0 waits in broadcast 2 of tp since 11:59:02 UTC, which rank 1 has not entered: it is in step 12, "
        "backward, megatron_fanformer/training/step.py:11 in take",
    ]


def test_a_collective_that_was_skipped_shows_where_the_ranks_parted() -> None:
    lines = report_lines(
        report(0, group("tp", [0, 1], "all-reduce", "all-gather", "all-reduce"), group("world", [0, 1]), world_size=2),
        report(1, group("tp", [0, 1], "all-reduce", "all-reduce"), group("world", [0, 1], "broadcast"), world_size=2),
    )
    assert lines[0] == (
        "collective 2 of tp differs, all-gather of 8 bytes on rank 0, all-reduce of 8 bytes on rank 1: one of them "
        "skipped one"
    )
    assert "rank 1 waits in broadcast 1 of world" in lines[1] and "which rank 0 has not entered" in lines[1]
    assert "rank 0 waits in all-reduce 3 of tp" in lines[2] and "which rank 1 has not entered" in lines[2]


def test_a_rank_without_a_report_and_ranks_that_are_equally_far() -> None:
    both = group("world", [0, 1, 2], "all-reduce")
    assert report_lines(report(0, both), report(1, both)) == [
        "rank 2 has written no report: its process is stopped or gone, or cannot write"
    ]
    assert report_lines(report(0, both), report(1, both), report(2, both)) == []
    # Of a group that a rank has entered nothing of, it remembers nothing.
    [line] = report_lines(report(0, both), report(1, both), report(2))
    assert "ranks 0 to 1 wait in all-reduce 1 of world" in line and "which rank 2 has not entered" in line


def test_of_what_the_same_ranks_wait_for_the_first_is_said() -> None:
    both = group("pp from rank 0 to 1", [0, 1], "message", "message", at=5), group("pp", [0, 1], "barrier", at=3)
    later = group("dp", [1, 0], at=8), group("dp", [1, 0], "broadcast", at=8)
    lines = report_lines(report(0, *both, later[0], world_size=2), report(1, later[1], world_size=2))
    assert len(lines) == 2
    assert lines[0].startswith("rank 0 waits in barrier 1 of pp since 12:00:04 UTC, which rank 1 has not entered")
    assert lines[1].startswith("rank 1 waits in broadcast 1 of dp since 12:00:09 UTC, which rank 0 has not entered")


def test_what_lies_further_back_than_is_remembered_still_shows_who_is_behind() -> None:
    ahead, behind = group("tp", [0, 1], "barrier", skipped=90), group("tp", [0, 1], "barrier", skipped=89)
    [line] = report_lines(report(0, ahead, world_size=2), report(1, behind, world_size=2))
    assert "rank 0 waits in barrier 91 of tp" in line


# -- what a rank remembers


def enter_some() -> dict[str, list[tuple[int, str, int]]]:
    """Enter collectives on two ranks; what is remembered by label."""
    before = vars(dist.ProcessGroup)["allreduce"]
    with remembering_collectives():
        numbers = torch.arange(4.0)
        dist.all_reduce(numbers)
        dist.broadcast(numbers[:2].clone(), src=0)
        rank = dist.get_rank()
        for source, target in ((0, 1), (1, 0), (0, 1)):
            if rank == source:
                dist.send(numbers, dst=target)
            else:
                dist.recv(numbers, src=source)
        dist.barrier()
        found = {each.label: [entered[:3] for entered in each.last] for each in records()}
    assert records() == [] and vars(dist.ProcessGroup)["allreduce"] is before
    return found


def test_ranks_remember_the_same_collectives_and_messages_by_direction(run_on_ranks: RunOnRanks) -> None:
    for found in run_on_ranks(2, enter_some):
        assert found == {
            "world": [(1, "all-reduce", 16), (2, "broadcast", 8), (3, "barrier", 0)],
            "world from rank 0 to 1": [(1, "message", 16), (2, "message", 16)],
            "world from rank 1 to 0": [(1, "message", 16)],
        }


def skip_one(run: Path) -> None:
    """Enter two all-reduces, of which rank 1 leaves out the second until both have reported."""
    with remembering_collectives(), reporting_hangs(run):
        rank, numbers = dist.get_rank(), torch.ones(3)
        both = dist.new_group()
        dist.all_reduce(numbers)
        second = dist.all_reduce(numbers, async_op=True) if rank == 0 else None
        write_report("step-00000007-x", rank=rank, world_size=2, step=7, doing="backward", seconds=PATIENCE_SECONDS)
        dist.barrier(both)
        (second or dist.all_reduce(numbers, async_op=True)).wait()


def test_a_rank_that_skips_a_collective_over_gloo_is_named(run_on_ranks: RunOnRanks, tmp_path: Path) -> None:
    run_on_ranks(2, skip_one, tmp_path)
    [line] = findings(read_reports(tmp_path / "hangs" / "step-00000007-x"))
    assert line.startswith("rank 0 waits in all-reduce 2 of world since ")
    assert " UTC, which rank 1 has not entered: it is in step 7, backward" in line


# -- reports


def test_a_report_has_this_process_stacks_and_is_read_back(tmp_path: Path) -> None:
    with reporting_hangs(tmp_path):
        write_report("step-00000012-x", rank=1, world_size=2, step=12, doing="forward", seconds=60)
    folder = tmp_path / "hangs" / "step-00000012-x"
    [found] = read_reports(folder).values()
    assert (found.rank, found.step, found.doing) == (1, 12, "forward")
    main_thread = found.threads[0]
    assert main_thread.name == "MainThread"
    functions = [frame.function for frame in main_thread.frames]
    assert any("test_a_report_has_this_process_stacks" in function for function in functions)
    assert any(frame.file == "megatron_fanformer/runtime/hang_report.py" for frame in main_thread.frames)
    write_report("elsewhere", rank=1, world_size=2, step=12, doing="forward", seconds=60)  # reported nowhere
    assert [path.name for path in (tmp_path / "hangs").iterdir()] == ["step-00000012-x"]
    report_file(folder, 0).write_text('{"rank": 0}')
    with pytest.raises(CorruptError, match=r"rank-00000\.json is not a rank's report of a hang"):
        read_reports(folder)


def test_a_file_system_that_hangs_keeps_no_rank_from_ending(tmp_path: Path) -> None:
    released = threading.Event()
    with reporting_hangs(tmp_path), mock.patch.object(hang_report, "_write", lambda *_: released.wait()):
        write_report("step-1", rank=0, world_size=2, step=1, doing="forward", seconds=0.01)  # returns
    released.set()


def test_nccls_recorder_is_read_as_torch_writes_it(caplog: pytest.LogCaptureFixture) -> None:
    entry = {"process_group": ["3", "TENSOR_MODEL_PARALLEL_GROUP"], "collective_seq_id": 7, "is_p2p": False}
    entries = [
        {**entry, "profiling_name": "nccl:all_reduce", "state": "completed"},
        {**entry, "collective_seq_id": 8, "profiling_name": "nccl:_all_gather_base", "state": "started"},
    ]
    found = incomplete_entries(json.dumps({"version": "2.10", "entries": entries}).encode())
    assert found == [NCCLEntry("3 TENSOR_MODEL_PARALLEL_GROUP", 8, "nccl:_all_gather_base", "started")]
    assert incomplete_entries(b"{}") == []
    assert incomplete_entries(b'{"entries": [{"new": 1}]}') == []
    assert "flight recorder cannot be read" in caplog.text


# -- how all ranks come to report


@pytest.fixture
def two_ranks(tmp_path: Path) -> Iterator[tuple[Path, list[Any]]]:
    """A run whose two ranks beat in this process and make no progress in a step; what they end with."""
    store, ended = dist.HashStore(), []
    activities = [Activity(step=12, in_step=True, doing=doing) for doing in ("forward", "loading samples")]
    (tmp_path / "run").mkdir()
    with reporting_hangs(tmp_path / "run"), mock.patch.object(heartbeat, "LATE_BEATS", 1e9):
        ranks = [
            Heartbeat(store, rank, 2, address="a:1", limit_seconds=0.4, activity=activity, end=ended.append)
            for rank, activity in enumerate(activities)
        ]
        for activity in activities:
            activity.step_seconds.append(0.1)
        for beats in ranks:
            beats.start()
        yield tmp_path / "run", ended
        for beats in ranks:
            beats.stop(0)


def test_the_main_rank_has_all_report_before_it_ends(
    two_ranks: tuple[Path, list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    run, ended = two_ranks
    wait_until(lambda: ended)
    line = str(ended[0])
    [folder] = (run / "hangs").iterdir()
    assert folder.name.startswith("step-00000012-")
    assert {rank: each.doing for rank, each in read_reports(folder).items()} == {0: "forward", 1: "loading samples"}
    assert f"; `inspect {run} --hang` has the stacks; check that machine, and run the same command" in line
    (run / "config.yaml").write_text("model: {}\n")
    (run / "checkpoints").mkdir()
    assert main(["inspect", str(run), "--hang"]) == 0
    shown = capsys.readouterr().out
    assert "all ranks have entered the same collectives; none is missing from one" in shown
    assert (
        "rank 1 on " in shown and "in step 12, loading samples" in shown and "more calls, which --full shows" in shown
    )
    assert main(["inspect", str(run), "--hang", "--full"]) == 0
    assert "heartbeat-_beats, innermost call first" in capsys.readouterr().out
    assert main(["inspect", str(folder), "--hang", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ranks"]["1"]["doing"] == "loading samples"


def test_ranks_that_find_the_main_one_silent_have_the_reports_of_each_other(tmp_path: Path) -> None:
    store, activity = dist.HashStore(), Activity(step=12, in_step=True, doing="forward")
    ranks = [Heartbeat(store, rank, 3, address="a:1", limit_seconds=0.04, activity=activity) for rank in range(3)]
    ranks[0].beat()
    for beats in ranks[1:]:
        beats.look()
    error = RankHangs(f"rank 0 on a has been silent for 1 s; {REMEDY}")
    later = mock.patch.object(ranks[1]._over, "wait", lambda _seconds: ranks[2]._reported(error))
    with reporting_hangs(tmp_path), later:  # rank 2 finds it a little later
        report_lines = str(ranks[1]._reported(error))
    [folder] = (tmp_path / "hangs").iterdir()
    assert sorted(read_reports(folder)) == [1, 2]
    assert report_lines.startswith(
        "rank 0 on a has been silent for 1 s; rank 0 has written no report: its process is stopped"
    )
    assert report_lines.count(REMEDY) == 1 and report_lines.endswith(f"; {REMEDY}")


def test_a_run_that_never_hung_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("model: {}\n")
    (tmp_path / "checkpoints").mkdir()
    assert main(["inspect", str(tmp_path), "--hang"]) == 2
    assert "has no report of a hang in hangs/" in capsys.readouterr().err
