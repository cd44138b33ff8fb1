"""Programs that a model wrote, each run in a process of its own that can do no more than compute.

Such a process has no network and starts no processes; it may read files and change none, and its home and working
folder are empty; memory, CPU time and wall time are limited. It ends with this one. What it prints is thrown away.

This is against the mistakes of a model, such as endless loops or the removal of files, and not against an attacker: the
program runs under the user's own account on the user's own kernel, and may read whatever that account may.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import megatron_fanformer
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluation import confinement
from megatron_fanformer.processes import usable_cores

POLL_SECONDS = 0.01

Outcome = Literal["passed", "failed", "timed out", "not run"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a program may use."""

    memory_bytes: int = 2**30
    """Of address space, Python's own of about 20 MB included."""
    cpu_seconds: int = 20
    wall_seconds: float = 120.0
    """In which it runs or sleeps; what other processes keep it from running does not count."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a program ended."""

    outcome: Outcome
    """`passed`: it reached its end without an error."""
    message: str = ""
    """The error, or the signal, that ended it."""


NOT_RUN = Result(outcome="not run")


def check_confinement() -> None:
    """See whether programs can be confined here, by an empty one.

    Raises:
        InputError: they cannot.
    """
    found = _run("", Limits())
    if found.outcome != "passed":
        raise InputError(
            f"programs cannot be confined on this machine ({found.message or found.outcome}); use --run-code on Linux "
            "(x86-64, ARM64) where seccomp filters are allowed, or leave it out"
        )


def run_programs(
    programs: Sequence[str],
    *,
    limits: Limits = Limits(),
    workers: int | None = None,
    tell: Callable[[int], None] = lambda ended: None,
) -> list[Result]:
    """Run Python programs, several at a time, each confined; their results in order.

    Args:
        workers: how many at a time; None: as many as there are cores.
        tell: called after each, in order, with the number that have ended.

    Raises:
        InputError: they cannot be confined on this machine.
    """
    check_confinement()
    workers = workers or usable_cores()
    results = []
    with ThreadPoolExecutor(workers) as pool:
        started = [pool.submit(_run, program, limits) for program in programs]
        try:
            for number, future in enumerate(started, start=1):
                results.append(future.result())
                tell(number)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return results


def _run(program: str, limits: Limits) -> Result:
    """Start one, wait for it, and kill it in the end. It can have no children, so that none is left."""
    password = secrets.token_hex().encode()  # without it, a program that leaves early could tell that it has passed
    reader, writer = os.pipe()
    arguments = (os.getpid(), writer, limits.memory_bytes, limits.cpu_seconds)
    with tempfile.TemporaryDirectory(prefix="program-") as home, os.fdopen(reader, "rb") as report:
        try:
            process = subprocess.Popen(
                [sys.executable, "-B", "-m", confinement.__name__, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(writer,),
                cwd=home,
                env={
                    "HOME": home,
                    "TMPDIR": home,
                    "PYTHONPATH": str(Path(megatron_fanformer.__file__).parents[1]),
                    "PYTHONHASHSEED": "0",
                    "OMP_NUM_THREADS": "1",
                    "LC_ALL": "C.UTF-8",
                },
                start_new_session=True,  # the terminal's signals are not for it
            )
        finally:
            os.close(writer)
        with process:
            try:
                ended = _wait(process, password + b"\n" + program.encode(errors="replace"), limits.wall_seconds)
            finally:
                process.kill()
            if not ended:
                return Result(outcome="timed out", message=f"it took more than {limits.wall_seconds:g} s")
        return _result(process.returncode, report.read(), password, limits)


def _wait(process: "subprocess.Popen[bytes]", given: bytes | None, seconds: float) -> bool:
    """Give a program its input and wait until it ends; False after so many seconds in which it ran or slept.

    Those in which it waited for a core do not count: other processes take them, which says nothing of the program.
    """
    began = time.monotonic()
    left = seconds
    while left > 0:
        try:
            process.communicate(given, timeout=max(left, POLL_SECONDS))
            return True
        except subprocess.TimeoutExpired:
            given = None  # what is left of it is kept there
            left = seconds - (time.monotonic() - began - _seconds_without_core(process.pid))
    return False


def _seconds_without_core(pid: int) -> float:
    """How long a process could have run and had no core; 0 from a kernel that does not count it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _result(code: int, told: bytes, password: bytes, limits: Limits) -> Result:
    text = told.decode(errors="replace")
    if text.startswith(confinement.UNCONFINED):
        return Result(outcome="not run", message=text.removeprefix(confinement.UNCONFINED))
    if told == password:
        return Result(outcome="passed")
    if code == -signal.SIGXCPU:
        return Result(outcome="timed out", message=f"it took more than {limits.cpu_seconds} s of CPU time")
    if code < 0:
        return Result(outcome="failed", message=f"a signal ended it: {signal.strsignal(-code)}")
    return Result(outcome="failed", message=text or f"it ended itself with exit code {code}")
