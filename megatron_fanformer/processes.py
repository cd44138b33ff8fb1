"""This program's own processes: their signals, cores and garbage, and how none outlives the one that started it."""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_fanformer.errors import Interrupted

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals on which a run saves and stops."""
SAVE_SIGNAL = signal.SIGUSR2
"""Signal on which a run saves and goes on."""
NOTHING_LOST = "with no step in progress; nothing is lost, run the same command to continue"
PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when its parent ends, however that ends; to be called by the child.

    (The parent is the thread that started it: workers are started by a thread that lives as long as they work.)
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def end_with_owner(owner: int | None = None) -> None:
    """`end_with_parent` for a process whose parent is known; it also ends if that one has already ended.

    Args:
        owner: the parent's process id; None: of the process that spawned this one by `multiprocessing`.
    """
    end_with_parent()
    if owner is None:
        parent = multiprocessing.parent_process()
        owner = None if parent is None else parent.pid
    if owner != os.getppid():
        os._exit(1)


def seconds_since_start(process: int) -> float:
    """Return how long ago a process of this machine was started."""
    ticks = int(stat_fields(process)[19])  # starttime, proc(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def stat_fields(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on: the name before it may be any bytes."""
    return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].decode("ascii").split()


@contextmanager
def signals_to(handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Pass the signals to stop and to save to a function; restore the handlers after. Under `nohup`, SIGHUP is none."""
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {
        number: signal.signal(number, lambda number, _frame: handler(signal.Signals(number)))
        for number in (*numbers, SAVE_SIGNAL)
    }
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before)  # examples/slurm.sh holds them back until there are handlers
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


@contextmanager
def ended_by_stop_signals(outcome: str = NOTHING_LOST) -> Iterator[None]:
    """End work on the first signal to stop, as Ctrl-C would: by an error. Later ones and those to save are ignored.

    Args:
        outcome: the end of the line, after the signal's name: the state of the work, and how to go on.

    Raises:
        Interrupted: a signal came, and the work has ended.
    """
    came: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        if number != SAVE_SIGNAL and not came:
            came.append(number)
            raise KeyboardInterrupt  # which no work takes for a failure of its own

    try:
        with signals_to(stop):
            yield
    except KeyboardInterrupt:
        if not came:
            raise
        stopped = Interrupted(f"stopped on {came[0].name} {outcome}")
        stopped.is_final = True
        raise stopped from None


@contextmanager
def manual_gc() -> Iterator[None]:
    """Turn automatic garbage collection off: ranks would each pause at a different moment, and wait for each other."""
    was_frozen = gc.get_freeze_count() > 0  # by whoever does several runs, and is not to have it undone
    gc.collect()
    if not was_frozen:
        gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not was_frozen:
            gc.unfreeze()


def usable_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return how many cores this process may use at once: those it may run on, and no more than a container's quota.

    With a quota of 1.5 cores 1 is used: two threads would be stopped for a quarter of the time, together with whatever
    waits for them.
    """
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no control groups, or no quota ("max")
        quota, period = map(int, quota_file.read_text().split())
        cores = min(cores, quota // period)
    return max(1, cores)
