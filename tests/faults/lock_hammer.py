"""Processes that take a run's lock and let it go, over and over, and are killed at random moments.

    python -m tests.faults.lock_hammer FOLDER SECONDS

Each that holds the lock says so in the file `inside`. Prints how often it was taken, how many were killed, and how
often one that held it found another one alive inside; the lock must be free at the end.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from megatron_fanformer.checkpoint.run_lock import _start_time, run_lock
from megatron_fanformer.errors import InputError

WORKERS = 6


def work(run: Path, notes: Path) -> None:
    """Hold the lock again and again, until killed."""
    inside = notes / "inside"
    while True:
        try:
            with run_lock(run):
                (notes / f"taken-{os.getpid()}-{time.monotonic_ns()}").touch()
                message = inside.read_text() if inside.exists() else ""
                if message and _start_time(int(message)) is not None:
                    (notes / f"violated-{os.getpid()}-{time.monotonic_ns()}").touch()
                partial = notes / f"{os.getpid()}"
                partial.write_text(str(os.getpid()))
                partial.replace(inside)
                time.sleep(random.random() / 200)
                inside.unlink()
        except InputError:
            time.sleep(random.random() / 500)


def begin(run: Path, notes: Path) -> int:
    """A worker's process."""
    if (pid := os.fork()) == 0:
        random.seed(os.getpid())
        try:
            work(run, notes)
        finally:
            os._exit(9)  # of itself, none ends
    return pid


def hammer(folder: Path, seconds: float) -> dict[str, int]:
    """Run it; returns the counts."""
    run, notes = folder / "run", folder / "notes"
    run.mkdir(parents=True)
    notes.mkdir()
    workers, killed, ended = [begin(run, notes) for _ in range(WORKERS)], 0, 0
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(random.random() / 50)
        victim = workers.pop(random.randrange(WORKERS))
        os.kill(victim, signal.SIGKILL)
        _, status = os.waitpid(victim, 0)
        killed, ended = killed + 1, ended + os.WIFEXITED(status)
        workers.append(begin(run, notes))
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with run_lock(run):
        pass
    counts = {name: len(list(notes.glob(f"{name}-*"))) for name in ("taken", "violated")}
    return {**counts, "killed": killed, "ended by an error": ended}


if __name__ == "__main__":
    print(json.dumps(hammer(Path(sys.argv[1]), float(sys.argv[2]))))
