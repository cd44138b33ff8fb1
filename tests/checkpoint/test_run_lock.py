"""The lock of a run's folder: one holder at a time, and none that is dead."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_fanformer.checkpoint import run_lock as locks
from megatron_fanformer.checkpoint.run_folder import LOCK
from megatron_fanformer.checkpoint.run_lock import Holder, holder_of, run_lock
from megatron_fanformer.errors import InputError
from tests.patience import PATIENCE_SECONDS, wait_until

HOLD = """
import sys, time, pathlib
from megatron_fanformer.checkpoint.run_lock import run_lock
with run_lock(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""
BEAT, STALE = 0.05, 0.5


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("BEAT_SECONDS", BEAT), ("STALE_SECONDS", STALE), ("LOOK_SECONDS", BEAT / 2)):
        monkeypatch.setattr(locks, name, seconds)


@contextlib.contextmanager
def held_by_another_process(run: Path) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def leave(run: Path, **changes: Any) -> Holder:
    """An entry as a process that was killed leaves it: of this machine, unless the changes say otherwise."""
    facts = {"host": "here", "pid": 2**22 + 1, "since": "once", "place": locks._place()}
    holder = Holder(**{**facts, **changes})
    (run / LOCK).write_bytes(msgspec.json.encode(holder))
    return holder


def is_free(run: Path) -> bool:
    """Whether the lock can be taken; nothing is left behind if so."""
    try:
        with run_lock(run):
            assert [path.name for path in run.iterdir()] == [LOCK]
    except InputError:
        return False
    assert list(run.iterdir()) == []
    return True


def test_a_run_in_progress_is_named_and_a_killed_one_is_succeeded_at_once(run: Path) -> None:
    with held_by_another_process(run) as process:
        with pytest.raises(InputError, match=rf"in use by a run on {os.uname().nodename} \(process {process.pid}\) si"):
            run_lock(run).__enter__()
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not locks._is_running(process.pid))
        assert is_free(run)  # though its parent has not reaped it


def test_the_holder_is_known_without_waiting(run: Path) -> None:
    assert holder_of(run / "nowhere") is holder_of(run) is None
    with run_lock(run):
        holder = holder_of(run)
        assert holder is not None and holder.pid == os.getpid()
    leave(run)
    assert holder_of(run) is None  # its process is dead
    elsewhere = leave(run, place="elsewhere")
    assert holder_of(run) == elsewhere
    os.utime(run / LOCK, (1, 1))
    assert holder_of(run) is None


def test_a_lock_that_was_taken_over_is_not_given_back(run: Path) -> None:
    with run_lock(run):
        leave(run)
    assert (run / LOCK).exists()


@pytest.mark.usefixtures("in_a_hurry")
def test_a_holder_elsewhere_lives_as_long_as_it_touches_its_lock(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_lock(run):  # which beats
        monkeypatch.setattr(locks, "STALE_SECONDS", PATIENCE_SECONDS)
        monkeypatch.setattr(locks, "_place", lambda: "elsewhere")
        with pytest.raises(InputError, match="in use"):
            run_lock(run).__enter__()
    monkeypatch.undo()
    monkeypatch.setattr(locks, "STALE_SECONDS", STALE)
    leave(run, place="elsewhere", pid=os.getpid())
    begun = time.monotonic()
    assert is_free(run)
    assert time.monotonic() - begun > STALE / 2


def test_a_folder_that_is_made_and_left_empty_is_removed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="wrong"), run_lock(tmp_path / "runs" / "new"):
        raise InputError("wrong")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["file", "file/run"])
def test_what_cannot_be_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"training\.run_dir .*; name a"):
        run_lock(tmp_path / name).__enter__()
