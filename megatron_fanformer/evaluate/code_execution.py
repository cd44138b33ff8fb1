"""Runs programs that a model wrote, each in a process of its own, within limits. This is no sandbox.

The limits stop programs with mistakes: endless loops, unlimited memory, fork bombs, written files. But a program runs
under the user's account: it can read and remove the user's files, use the network, or report a pass falsely.
Evaluate a model that you do not trust in a container.
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
    """The source of a program, and the source of tests, which run after the program and see its names."""

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
    """How a program ended."""

    outcome: Literal["passed", "failed", "timed out"]
    """`passed`: the program and its tests ran to their end without an error."""
    message: str = ""
    """The error, signal or limit that ended the program; empty if it passed."""


def run_programs(programs: Sequence[Program], *, limits: Limits = Limits()) -> list[Result]:
    """Run Python programs, as many at a time as there are cores, and return their results in order."""
    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(partial(_run_program, limits), programs))


def _run_program(limits: Limits, program: Program) -> Result:
    child_input = json.dumps([*program, limits.memory_bytes, limits.cpu_seconds]).encode()
    with (
        tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as home,
        subprocess.Popen(
            [sys.executable, "-s", "-B", "-c", f"{inspect.getsource(_child)}\n_child()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=home,
            # No other variable is inherited. (Not -I: Python would ignore the hash seed, and the order of sets vary.)
            env={"HOME": home, "TMPDIR": home, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"},
            start_new_session=True,
        ) as process,
    ):
        try:
            report, _ = process.communicate(child_input, limits.wall_seconds)
        except subprocess.TimeoutExpired:
            return Result(outcome="timed out", message=f"it took more than {limits.wall_seconds:g} s")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and all processes that the program started
    if report:  # `passed` or an error; nothing if the program ended the process
        text = report.decode(errors="replace")
        return Result(outcome="passed") if text == "passed" else Result(outcome="failed", message=text)
    if process.returncode == -signal.SIGXCPU:
        return Result(outcome="timed out", message=f"it took more than {limits.cpu_seconds} s of CPU time")
    if process.returncode < 0:
        return Result(outcome="failed", message=f"a signal ended it: {signal.strsignal(-process.returncode)}")
    return Result(outcome="failed", message=f"it ended itself with exit code {process.returncode}")


def _child() -> None:
    """Read a program from standard input, run it and its tests; write `passed` or the error to standard output.

    The child process runs this function's source alone, which therefore imports all that it uses.
    """
    import ctypes
    import json
    import os
    import resource
    import sys
    import types

    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: killed when its parent ends
    source, tests, memory_bytes, cpu_seconds = json.load(sys.stdin)
    report = os.dup(1)
    for stream in range(3):  # the program's input is empty, and its output is discarded
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))  # SIGXCPU, then SIGKILL
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    def refuse_processes(event: str, _arguments: object) -> None:
        # No RLIMIT_NPROC: it does not limit root, and for another user it counts all of the user's processes.
        if event.startswith(("os.fork", "os.exec", "os.posix_spawn", "os.system", "subprocess.", "os.kill")):
            raise PermissionError(f"{event} is refused")

    sys.addaudithook(refuse_processes)
    # The program runs in a new module, so that it does not see the names of this one.
    module = types.ModuleType("__main__")
    sys.argv, sys.modules["__main__"] = ["program"], module
    text = "passed"
    try:
        exec(compile(source, "<program>", "exec"), module.__dict__)
        exec(compile(tests, "<tests>", "exec"), module.__dict__)
    except BaseException as error:  # SystemExit, too: a program that exits before its tests end has not passed
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    os.write(report, text.encode(errors="replace"))
    os._exit(0)  # without waiting for threads or exit handlers of the program
