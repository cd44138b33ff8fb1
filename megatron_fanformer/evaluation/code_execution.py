"""Programs that a model wrote, each in a process of its own that can do no more than compute, and judged in another.

Such a process has no network and starts no processes; it may read Python's own files and change none, and its home and
working folder are empty; memory, CPU time and wall time are limited. It ends with this one. What it prints is thrown
away. The tests are run by a judge, in a second process with no more rights, which queries the first for values; the
verdict is the judge's.

The program runs under the user's own account on the user's own kernel: a gap in that would be one in the wall.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import megatron_fanformer
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluation import confinement, judging
from megatron_fanformer.evaluation.readable_files import refuse_inspection
from megatron_fanformer.processes import usable_cores

POLL_SECONDS = 0.01

Outcome = Literal["passed", "failed", "timed out", "not run"]


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program, and how it is judged."""

    source: str
    tests: str = ""
    """Tests that the judge runs; the program's names in them stand for its objects in its own process."""
    head: str = ""
    """Code before the model's own: an unfinished function, and what comes before it."""
    own_names: tuple[str, ...] = ()
    """Names of Python's own functions that the program must define, such as `sum`: in the tests they mean the
    program's."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The resources that a program may use; its judge as much."""

    memory_bytes: int = 2**30
    """Address space, including about 20 MB of Python's own."""
    cpu_seconds: int = 20
    wall_seconds: float = 120.0
    """Time that it may run or sleep; time when other processes keep it from running does not count."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The end that a program came to."""

    outcome: Outcome
    """`passed`: it and its tests reached their end without an error."""
    message: str = ""
    """The error, or the signal, that ended it."""


def check_confinement() -> None:
    """Check that programs can be confined here, by running an empty one.

    Raises:
        InputError: they cannot.
    """
    found = _run(Program(source=""), Limits())
    if found.outcome != "passed":
        raise InputError(
            f"programs cannot be confined on this machine ({found.message or found.outcome}); use --run-code on Linux "
            "(x86-64, ARM64) where seccomp filters are allowed, or leave it out"
        )


def run_programs(
    programs: Sequence[Program],
    *,
    limits: Limits = Limits(),
    workers: int | None = None,
    on_result: Callable[[int], None] = lambda ended: None,
) -> list[Result]:
    """Run Python programs, several at a time, each confined and judged; their results in order.

    Args:
        workers: how many at a time; None: as many as there are cores.
        on_result: called after each, in order, with the number that have ended.

    Raises:
        InputError: they cannot be confined on this machine.
    """
    check_confinement()
    results = []
    refuse_inspection()  # of this process, which has read all tests
    try:
        with ThreadPoolExecutor(workers or usable_cores()) as pool:
            started = [pool.submit(_run, program, limits) for program in programs]
            try:
                for number, future in enumerate(started, start=1):
                    results.append(future.result())
                    on_result(number)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        refuse_inspection(refused=False)
    return results


def _run(program: Program, limits: Limits) -> Result:
    """Start a program and its judge, wait for the verdict, and kill both. They can have no children."""
    given = json.dumps({"head": program.head, "tests": program.tests, "own_names": program.own_names}).encode()
    with tempfile.TemporaryDirectory(prefix="program-") as home:
        (query_in, query_out), (answer_in, answer_out), (report_in, report_out) = (os.pipe() for _ in range(3))
        with os.fdopen(report_in, "rb") as report:
            try:
                running = _started(confinement.__name__, (query_in, answer_out), home, limits)
                judge = _started(judging.__name__, (answer_in, query_out, report_out), home, limits)
            finally:
                for end in (query_in, query_out, answer_in, answer_out, report_out):
                    os.close(end)
            with running, judge:
                try:
                    _give(running, program.source.encode(errors="replace"))
                    _give(judge, given)
                    return _result(report, judge, running, limits)
                finally:
                    judge.kill()
                    running.kill()


def _started(module: str, ends: tuple[int, ...], home: str, limits: Limits) -> "subprocess.Popen[bytes]":
    arguments = (os.getpid(), *ends, limits.memory_bytes, limits.cpu_seconds, home)
    return subprocess.Popen(
        [sys.executable, "-B", "-m", module, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=ends,
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


def _give(process: "subprocess.Popen[bytes]", content: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(content)
    with suppress(BrokenPipeError):
        process.stdin.close()


def _wait(process: "subprocess.Popen[bytes]", other: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Wait until a process ends; False after so many seconds in which it or the other ran or slept.

    Seconds in which either waited for a core do not count: other processes used them, not the program.
    """
    began = time.monotonic()
    left = seconds
    while left > 0:
        try:
            process.wait(max(left, POLL_SECONDS))
            return True
        except subprocess.TimeoutExpired:
            without = sum(_seconds_without_core(each.pid) for each in (process, other))
            left = seconds - (time.monotonic() - began - without)
    return False


def _seconds_without_core(pid: int) -> float:
    """Return how long a process could have run and had no core; 0 from a kernel that does not count it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _result(
    stream: BinaryIO, judge: "subprocess.Popen[bytes]", running: "subprocess.Popen[bytes]", limits: Limits
) -> Result:
    """Wait for the result by the judge's report, or by how it, or the program before it, has ended."""
    too_long = Result(outcome="timed out", message=f"it took more than {limits.wall_seconds:g} s")
    if not _wait(judge, running, limits.wall_seconds):
        return too_long
    report = stream.read()
    kind, text = json.loads(report) if report else (judging.FAILED, "")
    if kind == judging.UNCONFINED:
        return Result(outcome="not run", message=text)
    if kind == judging.PASSED:
        return Result(outcome="passed")
    if report and kind != judging.GONE:
        return Result(outcome="failed", message=text)
    ended, other = (running, judge) if kind == judging.GONE else (judge, running)
    if not _wait(ended, other, limits.wall_seconds):  # it has closed its pipes, and stays
        return too_long
    code = ended.returncode
    if code == -signal.SIGXCPU:
        return Result(outcome="timed out", message=f"it took more than {limits.cpu_seconds} s of CPU time")
    if code < 0:
        return Result(outcome="failed", message=f"a signal ended it: {signal.strsignal(-code)}")
    return Result(outcome="failed", message=f"it ended itself with exit code {code}")
