"""Signals, CPU cores and garbage collection of a process, and child processes that end when their parent does."""

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
"""Signals that make a run save and stop."""
SAVE_SIGNAL = signal.SIGUSR2
"""Signal that makes a run save and go on."""
NOTHING_LOST = "with no step in progress; nothing is lost, run the same command to continue"


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when its parent ends, even if the parent is killed.

    To the kernel, the parent is the thread that started this process: start processes by a thread that outlives them.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def end_with_owner(owner: int | None = None) -> None:
    """Make the kernel kill this process when its parent ends; end this process now if the parent has ended already.

    Args:
        owner: the parent's process id; None: the parent started this process by `multiprocessing`.
    """
    end_with_parent()
    if owner is None:
        owner = getattr(multiprocessing.parent_process(), "pid", None)
    if owner != os.getppid():
        os._exit(1)


def seconds_since_start(process: int) -> float:
    """Return how long ago a process on this machine started."""
    ticks = int(stat_fields(process)[19])  # starttime, proc(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def stat_fields(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; the process's name, before the state, may be any bytes."""
    return Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].decode("ascii").split()


@contextmanager
def signals_to(handler: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call `handler` for each signal to stop or to save that is not ignored; afterwards restore the former handlers.

    `nohup` ignores SIGHUP, and a shell ignores SIGINT for a command in its background.
    """
    numbers = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    former_handlers = {
        number: signal.signal(number, lambda number, _frame: handler(signal.Signals(number)))
        for number in (*numbers, SAVE_SIGNAL)
    }
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, former_handlers)  # slurm.sh blocks them; a pending one may raise
        yield
    finally:
        for number, former in former_handlers.items():
            signal.signal(number, former)


@contextmanager
def ended_by_stop_signals(outcome: str = NOTHING_LOST) -> Iterator[None]:
    """End the block by an error on the first signal to stop; ignore later signals, and signals to save.

    Raises Interrupted if a signal ended the block; `outcome` follows the signal's name in the message.
    """
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        if number != SAVE_SIGNAL and not received:
            received.append(number)
            raise KeyboardInterrupt  # no `except Exception` in the block catches this

    try:
        with signals_to(stop):
            yield
    except KeyboardInterrupt:
        if not received:
            raise
        stopped = Interrupted(f"stopped on {received[0].name} {outcome}")
        stopped.is_final = True  # this process saves nothing, so the other ranks must not save, either
        raise stopped from None


@contextmanager
def manual_gc() -> Iterator[None]:
    """Turn automatic garbage collection off: it would pause each rank at a different moment, and all others wait."""
    was_frozen = gc.get_freeze_count() > 0  # by a process of several runs, whose shared objects must stay frozen
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
    """Return the number of cores that this process may use: its CPU affinity, limited by the container's quota.

    A quota is rounded down: with 1.5 cores, two threads would stand still for a quarter of the time.
    """
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no control groups, or no quota ("max")
        quota, period = map(int, quota_file.read_text().split())
        cores = min(cores, quota // period)
    return max(1, cores)
