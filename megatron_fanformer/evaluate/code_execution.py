"""Execution of programs that a model wrote, each in a process of its own, within limits. This is no sandbox.

The limits end mistakes: endless loops, memory without end, fork bombs, output. A program still runs under the user's
account, and can read and remove what the user can, use the network, or forge the report of a pass.
Whoever does not trust the model evaluates it in a container.
"""

import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from megatron_fanformer.processes import usable_cores


class Program(NamedTuple):
    """A program, and the tests that are run after it, with its names."""

    source: str
    tests: str = ""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The resources that a program may use."""

    memory_bytes: int = 2**30
    """Address space, including about 20 MB of Python's own."""
    cpu_seconds: int = 20
    wall_seconds: float = 120.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """The end that a program came to."""

    outcome: Literal["passed", "failed", "timed out"]
    """`passed`: it and its tests reached their end without an error."""
    message: str = ""
    """The error, or the signal, that ended it."""


def run_programs(programs: Sequence[Program], *, limits: Limits = Limits()) -> list[Result]:
    """Run Python programs, as many at a time as there are cores, and return their results in order."""
    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(partial(_run, limits), programs))


def _run(limits: Limits, program: Program) -> Result:
    given = json.dumps([*program, limits.memory_bytes, limits.cpu_seconds]).encode()
    with (
        tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as home,
        subprocess.Popen(
            [sys.executable, "-s", "-B", "-c", f"{inspect.getsource(_child)}\n_child()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=home,
            # Nothing else is inherited. (-I would ignore the seed, and sets would have another order each time.)
            env={"HOME": home, "TMPDIR": home, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        ) as process,
    ):
        try:
            report, _ = process.communicate(given, limits.wall_seconds)
        except subprocess.TimeoutExpired:
            return Result(outcome="timed out", message=f"it took more than {limits.wall_seconds:g} s")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if report:
        text = report.decode(errors="replace")
        return Result(outcome="passed") if text == "passed" else Result(outcome="failed", message=text)
    if process.returncode == -signal.SIGXCPU:
        return Result(outcome="timed out", message=f"it took more than {limits.cpu_seconds} s of CPU time")
    if process.returncode < 0:
        return Result(outcome="failed", message=f"a signal ended it: {signal.strsignal(-process.returncode)}")
    return Result(outcome="failed", message=f"it ended itself with exit code {process.returncode}")


def _child() -> None:
    """Run the program that the standard input holds, then its tests, and write to the standard output how they ended.

    The program's process is given the source of this function, which imports nothing of this package.
    """
    import ctypes
    import json
    import os
    import resource
    import sys
    import types

    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: ended with the process that started it
    source, tests, memory_bytes, cpu_seconds = json.load(sys.stdin)
    report = os.dup(1)
    for stream in range(3):  # output is lost, input empty
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))  # SIGXCPU, then SIGKILL
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    def refuse_processes(event: str, _arguments: object) -> None:
        # RLIMIT_NPROC does not bind root, and counts all processes and threads of any other user.
        if event.startswith(("os.fork", "os.exec", "os.posix_spawn", "os.system", "subprocess.", "os.kill")):
            raise PermissionError(f"{event} is refused")

    sys.addaudithook(refuse_processes)
    # A module of its own, so that the program finds nothing of this one by its name.
    module = types.ModuleType("__main__")
    sys.argv, sys.modules["__main__"] = ["program"], module
    text = "passed"
    try:
        exec(compile(source, "<program>", "exec"), module.__dict__)
        exec(compile(tests, "<tests>", "exec"), module.__dict__)
    except BaseException as error:  # SystemExit too: a program that leaves has not reached its end
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    os.write(report, text.encode(errors="replace"))
    os._exit(0)  # whatever threads and exit handlers the program has left
