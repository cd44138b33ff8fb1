"""Runs of two local ranks that are killed, stopped, slowed and signalled: seconds to the end, and the lines printed.

python -m tests.faults.lives                     # every fault, as a table
python -m tests.faults.lives "killed launcher"   # one
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from megatron_fanformer.runtime.roll_call import ANSWER_SECONDS
from megatron_fanformer.train.metrics import METRICS, read_metrics
from tests.patience import wait_until
from tests.small_runs import ROOT, small_run, start_command, write_config, write_tokens

LIMIT_SECONDS = 10.0
LATEST_SECONDS = LIMIT_SECONDS + ANSWER_SECONDS + 5
HANG = signal.SIGALRM
SKIP = signal.SIGVTALRM
HANGS = f"""
import signal, time

def skip(*_):
    import torch.distributed as dist
    original = dist.all_reduce

    def skipped(*arguments, **named):
        if named.get("async_op"):  # whoever calls it waits for what it returns
            return original(*arguments, **named)
        dist.all_reduce = original

    dist.all_reduce = skipped

signal.signal({int(HANG)}, lambda *_: time.sleep(600))
signal.signal({int(SKIP)}, skip)
"""
"""As `sitecustomize`: a signal on which a process's main thread does nothing any more, and all others go on; and one on
which it leaves out its next all-reduce."""
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

    def let_compute(self, rank: int, seconds: float) -> None:
        """Wait until a rank has had so much time of a CPU."""
        process = psutil.Process(self.ranks[rank])
        goal = sum(process.cpu_times()[:2]) + seconds
        self.wait_until(lambda: sum(process.cpu_times()[:2]) >= goal)

    def kill(self, rank: int, number: signal.Signals) -> None:
        assert self.process.poll() is None, self.process.communicate()
        os.kill(self.ranks[rank], number)


def start(folder: Path, ranks: int = 2, **sections: dict[str, Any]) -> Run:
    """Start a run without an end, whose collectives wait for `LIMIT_SECONDS`."""
    (folder / "sitecustomize.py").write_text(HANGS)
    values = small_run(
        write_tokens(folder / "tokens"),
        folder / "run",
        parallel={"tensor_model_parallel_size": ranks},
        runtime={"device": "cpu", "threads_per_rank": 1, "distributed_timeout_minutes": LIMIT_SECONDS / 60},
        training={"train_iters": 1_000_000, **sections.pop("training", {})},
        **sections,
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


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# -- what is done to a run; each returns when it is done


def kill_rank(run: Run) -> None:
    run.kill(1, signal.SIGKILL)


def kill_launcher(run: Run) -> None:
    run.process.kill()


def kill_group(run: Run) -> None:
    os.killpg(run.process.pid, signal.SIGKILL)


def stop_rank(rank: int) -> Callable[[Run], None]:
    def stop(run: Run) -> None:
        run.kill(rank, signal.SIGSTOP)

    return stop


def hang_rank(run: Run) -> None:
    """Its process lives, as one that waits for a file system."""
    run.kill(1, HANG)


def skip_collective(run: Run) -> None:
    """It goes on as if it had been in it; the others wait."""
    run.kill(1, SKIP)


def pause_rank(run: Run) -> None:
    """For less than the limit; it must go on, and is then told to stop."""
    run.kill(1, signal.SIGSTOP)
    time.sleep(LIMIT_SECONDS / 2)
    run.kill(1, signal.SIGCONT)
    run.wait_for_steps(3)
    run.process.terminate()


def slow_rank(run: Run) -> None:
    """One rank runs a tenth of the time, for twice the limit; the run must go on, and is then told to stop.

    Not from its first step: what a run imports after that takes seconds at this rate, without a sign of progress.
    """
    end = time.monotonic() + 2 * LIMIT_SECONDS
    while time.monotonic() < end:
        run.kill(1, signal.SIGSTOP)
        time.sleep(0.9)
        run.kill(1, signal.SIGCONT)
        run.let_compute(1, 0.05)  # by its own time: on a busy machine a tenth of a second may hold none of it
    run.wait_for_steps(3)
    run.process.terminate()


def terminate_thrice(run: Run) -> None:
    for _ in range(3):
        run.process.terminate()
        time.sleep(0.2)


def terminate_at_start(run: Run) -> None:
    """There is nothing to save yet: what asks for it is not to end a process."""
    run.process.send_signal(signal.SIGUSR2)
    for rank in run.ranks:
        run.kill(rank, signal.SIGUSR2)
    time.sleep(0.5)
    assert all(map(is_running, run.ranks.values()))
    run.process.terminate()


def terminate_one_rank(run: Run) -> None:
    run.kill(1, signal.SIGTERM)


def ask_for_saves(run: Run) -> None:
    """By the launcher, by a rank, by a file; the run must go on, and is then told to stop."""
    request = run.folder / "run" / "save"
    for ask in (
        lambda: run.process.send_signal(signal.SIGUSR2),
        lambda: run.kill(1, signal.SIGUSR2),
        request.touch,
    ):
        saved = run.checkpoints
        ask()
        run.wait_until(lambda saved=saved: run.checkpoints > saved)
    run.wait_until(lambda: not request.exists())
    run.wait_for_steps(3)
    saved = run.checkpoints
    assert len(saved) == 3, saved
    run.process.terminate()


def kill_ranks_until_it_gives_up(run: Run) -> None:
    """A restart is allowed: each new checkpoint allows another one, and without a new one the second is refused."""
    for rank in (1, 0):
        saved = run.checkpoints
        run.wait_until(lambda saved=saved: run.checkpoints > saved)
        before, killed = run.steps, run.ranks
        run.kill(rank, signal.SIGKILL)
        run.wait_until(lambda killed=killed: not any(map(is_running, killed.values())))
        run.wait_until(lambda: len(rank_processes(run.process.pid)) == 2)
        run.wait_until(lambda before=before: run.steps > before)
        run.ranks = rank_processes(run.process.pid)
    steps = [metrics["step"] for metrics in read_metrics(run.folder / "run")]
    assert steps == list(range(1, len(steps) + 1))
    run.kill(0, signal.SIGKILL)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that happens to a run, and what must follow."""

    do: Callable[[Run], None]
    code: int
    line: str
    """What the run must print, at least, as a regular expression; empty: nothing."""
    seconds: float = 5.0
    """How long the run, with all its ranks, may take to end."""
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: int = 1
    """Steps before it happens; 0: at the start, once the ranks are there."""


STOPPED = (
    "^megatron-fanformer: a collective waits in vain; rank {}: stopped or gone; rank {}: waiting at .*; run the same"
)
FAULTS: dict[str, Fault] = {
    "killed rank": Fault(do=kill_rank, code=1, line="^megatron-fanformer: rank 1: was killed by SIGKILL$"),
    "killed launcher": Fault(do=kill_launcher, code=-9, line=""),
    "killed group": Fault(do=kill_group, code=-9, line=""),
    "killed launcher at start": Fault(do=kill_launcher, code=-9, line="", steps=0),
    "stopped rank": Fault(do=stop_rank(1), code=1, line=STOPPED.format(1, 0), seconds=LATEST_SECONDS),
    "stopped main rank": Fault(do=stop_rank(0), code=1, line=STOPPED.format(0, 1), seconds=LATEST_SECONDS),
    "hung rank": Fault(
        do=hang_rank,
        code=1,
        line=r"in vain; rank 1: elsewhere, at .*sitecustomize.py:\d+ in .*; rank 0: waiting at .*; run the same",
        seconds=LATEST_SECONDS,
    ),
    "skipped collective": Fault(
        do=skip_collective,
        code=1,
        line=r"in vain; rank \d: waiting at .*; rank \d: waiting at .*; run the same",
        seconds=LATEST_SECONDS,
    ),
    "paused rank": Fault(do=pause_rank, code=5, line=SAVED, seconds=30),
    "slow rank": Fault(do=slow_rank, steps=3, code=5, line=SAVED, seconds=30),
    "three signals": Fault(do=terminate_thrice, code=5, line=f"stopped on SIGTERM, {SAVED}", seconds=30),
    "a signal to a rank": Fault(do=terminate_one_rank, code=5, line=f"a signal to a rank, {SAVED}", seconds=30),
    "asked to save": Fault(do=ask_for_saves, code=5, line=SAVED, seconds=30),
    "restarted": Fault(
        do=kill_ranks_until_it_gives_up,
        code=1,
        line="^megatron-fanformer: rank 0: was killed by SIGKILL$",
        sections={"training": {"max_restarts": 1}, "checkpoint": {"save_interval": 20}},
    ),
    "a signal to a rank at start": Fault(do=terminate_one_rank, code=5, line=f"stopped on SIGTERM {NO_STEP}", steps=0),
    "a signal at start": Fault(do=terminate_at_start, code=5, line=f"stopped on SIGTERM {NO_STEP}", steps=0),
}


def inflict(name: str, folder: Path, *, patience: float = 1.0) -> tuple[float, str]:
    """Do a fault to a run in a folder; seconds to the end of it all, and what it printed to stderr.

    Args:
        patience: the factor by which the machine may be slow.

    Raises:
        AssertionError: what followed is not what must.
    """
    fault, longest = FAULTS[name], patience * FAULTS[name].seconds
    run = start(folder, **fault.sections)
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
    return seconds, errors.strip()


def main() -> None:
    for name in sys.argv[1:] or FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                seconds, line = inflict(name, Path(folder))
            except AssertionError as error:
                seconds, line = float("nan"), f"FAILED: {error}"
        print(f"{name:26} {seconds:6.1f} s   {line}", flush=True)


if __name__ == "__main__":
    main()
