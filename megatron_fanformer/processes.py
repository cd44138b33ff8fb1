"""This program's own processes: their signals, cores and garbage, and how none outlives the one that started it."""

import ctypes
import functools
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

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


def hold_signals() -> set[signal.Signals]:
    """Make the kernel keep the signals to stop and to save until something here answers them; returns the mask before.

    To be called first of all in a process whose verb answers them. They reach it when `ended_by_stop_signals`, or
    `signals_released`, begins. Children inherit it, and with it the care for signals until they have begun.
    """
    return {signal.Signals(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, SAVE_SIGNAL))}


@contextmanager
def _masked(how: int) -> Iterator[None]:
    before = signal.pthread_sigmask(how, (*STOP_SIGNALS, SAVE_SIGNAL))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signals_held() -> AbstractContextManager[None]:
    """Hold signals around the start of children, as `hold_signals`, from their first instruction."""
    return _masked(signal.SIG_BLOCK)


def signals_released() -> AbstractContextManager[None]:
    """Let signals that were held reach this process inside; at the end they are held again, if they were."""
    return _masked(signal.SIG_UNBLOCK)


def _stop_signals() -> list[signal.Signals]:
    """Return those that this process does not ignore, as under `nohup`."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


@contextmanager
def _handled(handlers: dict[signal.Signals, Any], wakeup: int, *, is_last: bool = False) -> Iterator[None]:
    """Handle signals by the given handlers, and by the file that Python writes them to (-1: none); restore both after.

    Inside, none is held: held signals arrive at once. At the end, those that were held are ignored: this
    thread holds them again, but the default action of one that reaches another thread would end the process.

    Args:
        is_last: leave Python without that file at the end.
    """
    held = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    wakeup_before = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    try:
        with signals_released():
            yield
    finally:
        signal.set_wakeup_fd(-1 if is_last else wakeup_before)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if number in held else handler)


@contextmanager
def signals_to(handler: Callable[[signal.Signals], None], *, is_last: bool = False) -> Iterator[None]:
    """Pass the signals to stop, save and profile to a function, which only notes them; restores the handlers after.

    Args:
        is_last: nothing needs stopping after this block: the rest of an `ended_by_stop_signals` block around it
            continues, whatever signal comes.
    """

    def handle(number: int, _frame: Any) -> None:
        handler(signal.Signals(number))

    handlers = dict.fromkeys((*_stop_signals(), SAVE_SIGNAL), handle)
    with _handled(handlers, wakeup=-1, is_last=is_last):  # not the file of `ended_by_stop_signals`
        yield


@contextmanager
def ended_by_stop_signals(report: Callable[[str], None], *, outcome: str = NOTHING_LOST) -> Iterator[None]:
    """End this process at once on a signal to stop, with a line and code 5, during work that needs no saving.

    A signal to save is ignored. Inside, `signals_to` takes over. A thread ends the process, since the main one may be
    waiting in a library for minutes, where Python runs no handler.

    Args:
        outcome: the end of the line, after the signal's name: the state of the work, and how to go on.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def end() -> None:
        while number := os.read(reader, 1):
            if number[0] in STOP_SIGNALS:
                name = signal.Signals(number[0]).name
                try:
                    report(f"stopped on {name} {outcome}")
                finally:  # also where the line cannot be written
                    os._exit(Interrupted.exit_code)
        os.close(reader)

    handlers: dict[signal.Signals, Any] = dict.fromkeys(_stop_signals(), lambda *_: None)
    _leave_pipe_in_forks()
    try:
        with _handled({**handlers, SAVE_SIGNAL: signal.SIG_IGN}, wakeup=writer):
            threading.Thread(target=end, name="signals", daemon=True).start()
            yield
    finally:
        os.close(writer)  # which ends the thread


@contextmanager
def unwound_by_stop_signals(*, outcome: str) -> Iterator[None]:
    """End work that gives something back (a lock, other processes) on a signal to stop, as Ctrl-C would: by an error.

    The first signal ends it, and later ones are ignored meanwhile. A signal to save is ignored.

    Args:
        outcome: the end of the line, after the signal's name: the state of the work, and how to go on.

    Raises:
        Interrupted: a signal came, and the work has ended.
    """
    came: list[signal.Signals] = []

    def stop(number: int, _frame: Any) -> None:
        if not came:
            came.append(signal.Signals(number))
            raise KeyboardInterrupt  # which no work takes for a failure of its own

    try:
        with _handled({**dict.fromkeys(_stop_signals(), stop), SAVE_SIGNAL: signal.SIG_IGN}, wakeup=-1):
            yield
    except KeyboardInterrupt:
        if not came:
            raise
        raise Interrupted(f"stopped on {came[0].name} {outcome}") from None


@functools.cache
def _leave_pipe_in_forks() -> None:
    """Keep a forked child's signals out of its parent's pipe, which it inherits."""

    def leave() -> None:
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)

    os.register_at_fork(after_in_child=leave)


def freeze_gc() -> None:
    """Collect garbage, and exclude all remaining objects from later collections: for a process of many runs.

    torch and megatron-core are half a second of each collection.
    """
    gc.collect()
    gc.freeze()


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
