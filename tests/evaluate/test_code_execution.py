"""Programs of a model: right ones pass, mistakes fail and end within limits."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.evaluate.code_execution import Limits, Program, Result, run_programs
from tests.patience import is_running, wait_until
from tests.small_runs import ROOT

LIMITS = Limits(memory_bytes=2**28, cpu_seconds=20, wall_seconds=60.0)
PASSING = {
    "a class that looks for its module": "import dataclasses as d\nassert d.make_dataclass('A', ['x'])(1).x == 1",
    "a thread": "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
    "output": "print('x' * 10**6)",
    "an empty home": "import os\nassert os.listdir() == [] and os.path.expanduser('~') == os.getcwd()",
}
FAILING = {
    "closing all files": ("import os\nos.closerange(0, 64)", "it ended itself with exit code 1"),
    "fork bomb": ("import os\nwhile True:\n    os.fork()", "PermissionError: os.fork is refused"),
    "becoming a command": ("import os\nos.execv('/bin/true', ['true'])", "PermissionError: os.exec is refused"),
    "ending its parent": ("import os\nos.kill(os.getppid(), 9)", "PermissionError: os.kill is refused"),
    "memory hog": ("x = [b'']\nwhile True:\n    x.append(x[-1] + b'x' * 10**6)", "MemoryError"),
    "thread bomb": (
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(99,)).start()",
        "RuntimeError: can't start new thread",
    ),
    "writing": ("import pathlib\npathlib.Path('x').write_text('x')", "OSError: [Errno 27] File too large"),
    "many files": ("files = [open('/dev/null') for _ in range(64)]", "OSError: [Errno 24] Too many open files"),
    "a signal": ("import signal\nsignal.raise_signal(signal.SIGSEGV)", "a signal ended it: Segmentation fault"),
}


def run(sources: Iterable[str], **options: Any) -> list[Result]:
    """Programs that have no tests."""
    return run_programs([Program(source) for source in sources], **options)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    programs = PASSING | {name: program for name, (program, _) in FAILING.items()}
    return dict(zip(programs, run(programs.values(), limits=LIMITS), strict=True))


@pytest.mark.parametrize("name", PASSING)
def test_what_computes_passes(results, name):
    assert results[name] == Result(outcome="passed")


@pytest.mark.parametrize("name", FAILING)
def test_what_errs_or_starts_processes_fails(results, name):
    assert results[name].outcome == "failed"
    assert results[name].message.startswith(FAILING[name][1])


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("return x + 1", Result(outcome="passed")),
        ("return x", Result(outcome="failed", message="AssertionError: ")),
        ("raise SystemExit(0)", Result(outcome="failed", message="SystemExit: 0")),
        ("import os; os._exit(0)", Result(outcome="failed", message="it ended itself with exit code 0")),
    ],
)
def test_only_tests_that_reach_their_end_are_passed(answer, outcome):
    program = Program(f"def answer(x):\n    {answer}\n", "assert answer(1) == 2\nassert answer(2) == 3")
    assert run_programs([program], limits=LIMITS) == [outcome]


def test_endless_programs_are_ended_by_cpu_and_by_wall_time():
    computing, waiting = "while True: pass", "import time\ntime.sleep(600)"
    limits = Limits(cpu_seconds=1, wall_seconds=60.0)
    assert run([computing], limits=limits) == [Result(outcome="timed out", message="it took more than 1 s of CPU time")]
    limits = Limits(cpu_seconds=60, wall_seconds=1.0)
    silent = f"import os\nos.closerange(3, 64)\n{waiting}"  # it can report no more
    late = Result(outcome="timed out", message="it took more than 1 s")
    assert run([waiting, silent], limits=limits) == [late, late]


def test_a_program_ends_with_the_process_that_started_it(tmp_path):
    program = f"import os, time\nos.mkdir({str(tmp_path / 'begun')!r})\ntime.sleep(600)"
    started = (
        "from megatron_fanformer.evaluate.code_execution import Program, run_programs\n"
        f"run_programs([Program({program!r})])\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", started], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        wait_until(lambda: (tmp_path / "begun").exists())
        (child,) = _children(owner.pid)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    wait_until(lambda: not is_running(child))


def _children(pid: int) -> list[int]:
    return [int(child) for tasks in Path(f"/proc/{pid}/task").glob("*/children") for child in tasks.read_text().split()]
