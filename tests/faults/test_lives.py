"""Runs of two local ranks that are killed, stopped, hung and signalled end in time and say why, or go on."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_fanformer.runtime.roll_call import ANSWER_SECONDS
from megatron_fanformer.train.metrics import METRICS
from tests.patience import is_running, wait_until
from tests.small_runs import ROOT, small_run, start_command, write_config, write_tokens

LIMIT_SECONDS = 10.0
SLOW_MACHINE = 5  # the factor by which the machine may be slow
LATEST_SECONDS = LIMIT_SECONDS + ANSWER_SECONDS + 5
HANG = signal.SIGALRM
HANGS = f"""
import signal, time
signal.signal({int(HANG)}, lambda *_: time.sleep(600))
"""
"""As `sitecustomize`: a signal on which a process's main thread does nothing any more, and all others go on."""
SAVED = "saved; run the same command to continue"
NO_STEP = "with no step in progress; nothing is lost, run the same command to continue"


@dataclass
class Run:
    """A run in progress."""

    folder: Path
    process: "subprocess.Popen[str]"
    ranks: dict[int, int] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        metrics = self.folder / "run" / METRICS
        return len(metrics.read_text().splitlines()) if metrics.is_file() else 0

    @property
    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "run" / "checkpoints").glob("step-*"))

    def wait_until(self, condition: Callable[[], object]) -> None:
        wait_until(condition, self.process)

    def wait_for_steps(self, number: int = 1) -> None:
        """Until it has taken some more steps; finds its ranks."""
        goal = self.steps + number
        self.wait_until(lambda: self.steps >= goal)
        self.ranks = rank_processes(self.process.pid)

    def kill(self, rank: int, number: signal.Signals) -> None:
        assert self.process.poll() is None, self.process.communicate()
        os.kill(self.ranks[rank], number)


def start(folder: Path) -> Run:
    """Start a run without an end, whose collectives wait for `LIMIT_SECONDS`."""
    (folder / "sitecustomize.py").write_text(HANGS)
    values = small_run(
        write_tokens(folder / "tokens"),
        folder / "run",
        parallel={"tensor_model_parallel_size": 2},
        runtime={"device": "cpu", "threads_per_rank": 1, "distributed_timeout_minutes": LIMIT_SECONDS / 60},
        training={"train_iters": 1_000_000},
    )
    config = str(write_config(folder / "config.yaml", values))
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    return Run(folder, start_command("train", "--config", config, environment=environment))


def rank_processes(launcher: int) -> dict[int, int]:
    """The process of each rank that a launcher started."""
    ranks = {}
    for pid in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
        with suppress(OSError):  # it has just ended
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if entry.startswith(b"RANK="):
                    ranks[int(entry.removeprefix(b"RANK="))] = pid
    return ranks


# -- what is done to a run; each returns when it is done


def to_a_rank(number: signal.Signals) -> Callable[[Run], None]:
    """Send it a signal. After `HANG` its process lives, as one that waits for a file system."""
    return lambda run: run.kill(1, number)


def terminate_at_start(run: Run) -> None:
    """There is nothing to save yet: what asks for it is not to end a process."""
    run.process.send_signal(signal.SIGUSR2)
    for rank in run.ranks:
        run.kill(rank, signal.SIGUSR2)
    time.sleep(0.5)
    assert all(map(is_running, run.ranks.values()))
    run.process.terminate()


def ask_for_saves(run: Run) -> None:
    """By the launcher, by a rank, by a file; the run must go on, and is then told to stop."""
    request = run.folder / "run" / "save"
    for ask in (lambda: run.process.send_signal(signal.SIGUSR2), lambda: run.kill(1, signal.SIGUSR2), request.touch):
        saved = run.checkpoints
        ask()
        run.wait_until(lambda saved=saved: run.checkpoints > saved)
    run.wait_until(lambda: not request.exists())
    run.wait_for_steps(3)
    saved = run.checkpoints
    assert len(saved) == 3, saved
    run.process.terminate()


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens to a run, and what must follow."""

    do: Callable[[Run], None]
    code: int
    line: str
    """What the run must print, at least, as a regular expression; empty: nothing."""
    seconds: float = 5.0
    """How long the run, with all its ranks, may take to end."""
    steps: int = 1
    """Steps before it happens; 0: at the start, once the ranks are there."""


FAULTS: dict[str, Fault] = {
    "killed rank": Fault(
        do=to_a_rank(signal.SIGKILL), code=1, line="^megatron-fanformer: rank 1: was killed by SIGKILL$"
    ),
    "stopped rank": Fault(
        do=to_a_rank(signal.SIGSTOP),
        code=1,
        line="^megatron-fanformer: a collective waits in vain; rank 1: stopped or gone; rank 0: waiting at .*; run the",
        seconds=LATEST_SECONDS,
    ),
    "hung rank": Fault(
        do=to_a_rank(HANG),
        code=1,
        line=r"in vain; rank 1: elsewhere, at .*sitecustomize.py:\d+ in .*; rank 0: waiting at .*; run the same",
        seconds=LATEST_SECONDS,
    ),
    "asked to save": Fault(do=ask_for_saves, code=5, line=SAVED, seconds=30),
    "a signal at start": Fault(do=terminate_at_start, code=5, line=f"stopped on SIGTERM {NO_STEP}", steps=0),
}


@pytest.mark.full  # in every run: tests/runtime/test_roll_call.py, tests/test_processes.py
@pytest.mark.parametrize("name", FAULTS)
def test_a_run_ends_in_time_and_says_why_or_goes_on(name: str, tmp_path: Path) -> None:
    fault, longest = FAULTS[name], SLOW_MACHINE * FAULTS[name].seconds
    run = start(tmp_path)
    try:
        if fault.steps:
            run.wait_for_steps(fault.steps)
        else:
            run.wait_until(lambda: len(rank_processes(run.process.pid)) == 2)
            time.sleep(1)
            run.ranks = rank_processes(run.process.pid)
        fault.do(run)
        done = time.monotonic()
        _, errors = run.process.communicate(timeout=longest + 60)
        while any(map(is_running, run.ranks.values())) and time.monotonic() < done + longest:
            time.sleep(0.01)
        seconds = time.monotonic() - done
        assert not any(map(is_running, run.ranks.values())), "ranks are left"
    finally:
        run.process.kill()
        for pid in filter(is_running, run.ranks.values()):
            os.kill(pid, signal.SIGKILL)
    assert run.process.returncode == fault.code, (run.process.returncode, errors)
    assert re.search(fault.line, errors, re.MULTILINE) if fault.line else not errors, errors
    assert len(errors.splitlines()) <= 1, errors
    assert seconds < longest, seconds
    if fault.code == 5 and fault.steps:
        assert run.checkpoints[-1] == f"step-{run.steps:08d}", (run.checkpoints, run.steps)
