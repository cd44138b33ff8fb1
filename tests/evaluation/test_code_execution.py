"""Programs of a model: what they may do, and that their mistakes stay theirs."""

import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluation import code_execution, confinement, system_calls
from megatron_fanformer.evaluation.code_execution import Limits, Program, Result, run_programs
from tests.faults.lives import is_running
from tests.patience import wait_until
from tests.small_runs import ROOT

LIMITS = Limits(memory_bytes=2**28, cpu_seconds=20, wall_seconds=60.0)
PASSING = {
    "nothing": "",
    "mathematics": "import math\nassert math.isclose(math.cos(0), 1)",
    "a class that looks for its module": "import dataclasses as d\nassert d.make_dataclass('A', ['x'])(1).x == 1",
    "a thread": "import threading\nt = threading.Thread(target=print)\nt.start()\nt.join()",
    "output": "print('x' * 10**6)",
    "an empty home": "import os\nassert os.listdir() == [] and os.path.expanduser('~') == os.getcwd()",
    "another module": "import statistics\nassert statistics.mean([1, 3]) == 2",
    "a signal of its own": (
        "import signal\nfound = []\nsignal.signal(signal.SIGUSR1, lambda *told: found.append(told[0]))\n"
        "signal.raise_signal(signal.SIGUSR1)\nassert found == [signal.SIGUSR1]"
    ),
    "a loop of events": "import asyncio\nasyncio.run(asyncio.sleep(0))",
    "its own limits": "import resource\nassert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)",
}
CALL = """
import ctypes
library = ctypes.CDLL(None, use_errno=True)
if library.syscall({}) == -1:
    raise OSError(ctypes.get_errno(), "")
"""
"""A system call by its number, with no library's help."""
NEW_LIMITS = """
import ctypes, os, resource
library = ctypes.CDLL(None, use_errno=True)
library.mmap.restype = ctypes.c_void_p
address = ctypes.c_void_p({})
private_anonymous_there = 0x2 | 0x20 | 0x100000
assert library.mmap(address, ctypes.c_size_t(4096), 3, private_anonymous_there, -1, ctypes.c_long(0)) == address.value
if library.prlimit(0, resource.RLIMIT_CORE, address, None) == -1:
    raise OSError(ctypes.get_errno(), "")
"""
"""New limits in a page that begins at an address."""
REFUSED = "PermissionError: [Errno 1]"
FAILING = {
    "assertion": ("assert 1 == 2, 'no'", "AssertionError: no"),
    "syntax": ("def", "SyntaxError"),
    "leaving": ("import sys\nsys.exit(0)", "SystemExit: 0"),
    "leaving at once": ("import os\nos._exit(0)", "exit code 0"),
    "fork bomb": ("import os\nwhile True:\n    os.fork()", REFUSED),
    "a command": ("import subprocess\nsubprocess.run(['true'])", REFUSED),
    "becoming a command": ("import os\nos.execv('/bin/true', ['true'])", REFUSED),
    "ending its parent": ("import os\nos.kill(os.getppid(), 9)", REFUSED),
    "memory hog": ("x = [b'']\nwhile True:\n    x.append(x[-1] + b'x' * 10**6)", "MemoryError"),
    "thread bomb": (
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(99,)).start()",
        "RuntimeError: can't start new thread",
    ),
    "recursion": ("def f():\n    f()\nf()", "RecursionError"),
    "a socket": ("import socket\nsocket.create_connection(('127.0.0.1', 80), 1)", REFUSED),
    "writing at home": ("import pathlib\n(pathlib.Path.home() / 'x').write_text('x')", REFUSED),
    "more memory": ("import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40,) * 2)", "ValueError: not allowed"),
    "limits below 4 GiB": (NEW_LIMITS.format(2**29), REFUSED),  # an address whose high word is 0
    "limits at 4 GiB": (NEW_LIMITS.format(2**32), REFUSED),  # its low word is
    "reading an answer": ("input()", "EOFError"),
    "a datagram": ("import socket\nsocket.socketpair(type=socket.SOCK_DGRAM)", REFUSED),
    "a name for a socket": ("import socket\nsocket.socketpair()[0].bind('name')", REFUSED),
    "lower priority": ("import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), 19)", REFUSED),
    "fewer cores": ("import os\nos.sched_setaffinity(os.getppid(), os.sched_getaffinity(0))", REFUSED),
    "an attribute of a file": (
        "import fcntl, os\nfcntl.ioctl(os.open('.', os.O_RDONLY), 0x40086602, bytes(8))",  # FS_IOC_SETFLAGS
        REFUSED,
    ),
    "a signal": ("import signal\nsignal.raise_signal(signal.SIGSEGV)", "a signal ended it: Segmentation fault"),
}


def run(sources: Iterable[str], **options: Any) -> list[Result]:
    """Programs that have no tests."""
    return run_programs([Program(source=source) for source in sources], **options)


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    programs = PASSING | {name: program for name, (program, _) in FAILING.items()}
    return dict(zip(programs, run(programs.values(), limits=LIMITS), strict=True))


@pytest.mark.parametrize("name", PASSING)
def test_what_computes_passes(results, name):
    assert results[name] == Result(outcome="passed")


@pytest.mark.parametrize("name", FAILING)
def test_what_errs_or_reaches_out_fails(results, name):
    assert results[name].outcome == "failed"
    assert results[name].message.startswith(FAILING[name][1]) or FAILING[name][1] in results[name].message


# -- the judge

OBJECTS = """
import math
from collections import Counter, OrderedDict, deque, namedtuple
class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b
    def swapped(self):
        return Pair(self.b, self.a)
Point = namedtuple("Point", "x y")
def total(pairs): return math.fsum(pair.a for pair in pairs)
def numbers():
    yield from (1, 2.5, True, None, 2**200, 1j, "a\\ud800", b"b", range(3))
def kinds(): return [Counter("aab"), OrderedDict(a=1), Point(1, 2), {1, 2}, frozenset("x"), (), deque([1, 2])]
def fill(into, table):
    into.append(len(into))
    table["new"] = into
def fail(n): raise ValueError(n)
def sum(a, b): return a * b
"""
TESTS = """
assert total([Pair(1, 2), Pair(3, 4)]) == 4
pair = Pair(5, 6).swapped()
pair.a = 7
assert (pair.a, pair.b) == (7, 5) and pair == pair and pair != Pair(7, 5)
assert list(numbers()) == [1, 2.5, True, None, 2**200, 1j, "a\\ud800", b"b", range(3)]
counted, ordered, point, some, frozen, empty, ends = kinds()
assert (counted, ordered, point) == ({"a": 2, "b": 1}, {"a": 1}, (1, 2))
assert (some, frozen, empty) == ({1, 2}, {"x"}, ())
assert list(ends) == [1, 2] and len(ends) == 2 and ends[1] == 2 and bool(ends)
into, table = [9], {}
assert fill(into, table) is None and (into, table) == ([9, 1], {"new": [9, 1]})
try:
    fail(3)
except ValueError as error:
    assert str(error) == "3"
else:
    assert False
assert math.isclose(math.cos(0), 1) and sum([1, 2]) == 3
"""


def test_a_judge_sees_what_a_program_returns():
    (found,) = run_programs([Program(source=OBJECTS, tests=TESTS)], limits=LIMITS)
    assert found == Result(outcome="passed")
    asked = Program(source=OBJECTS, tests="assert sum(3, 4) == 12", own_names=("sum",))
    assert run_programs([asked], limits=LIMITS) == [Result(outcome="passed")]


SECRET = "assert answer(1) == 4711 and helper(answer(2)) == 4711"
HEAD = "def helper(x):\n    return x\n\ndef answer(x):\n"
SEEK = """
    import gc, json, os, re, struct, sys
    def seek(value):
        found = re.search(r"answer.1. == ([0-9]+)", str(value))
        return int(found[1]) if found else None
"""
# Of each the part that stands behind `def answer(x):` and what seeks.
FORGERIES = {
    "walking frames": """
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if seek(value):
                return seek(value)
        frame = frame.f_back""",
    "a traceback's frames": """
    try:
        raise KeyError
    except KeyError as error:
        frame = error.__traceback__.tb_frame
        while frame:
            if seek(frame.f_locals):
                return seek(frame.f_locals)
            frame = frame.f_back""",
    "all objects": """
    for one in gc.get_objects():
        if isinstance(one, (dict, list, tuple)) and seek(one):
            return seek(one)""",
    "equal to everything": """
    class Same:
        def __eq__(self, other): return True
        def __int__(self): return 1
    return Same()""",
    "a number that compares as it likes": """
    class Same(int):
        def __eq__(self, other): return True
        __hash__ = int.__hash__
    return Same(5)""",
    "a word in its pipes": """
    for number in range(3, 64):
        for word in (b"unconfined: x", b'["passed", ""]', b"passed"):
            try:
                os.write(number, word)
            except OSError:
                pass
    os._exit(0)""",
    "an answer out of turn": """
    content = json.dumps(["module", "unittest.mock"]).encode()  # of which ANY is equal to everything
    for number in range(3, 64):
        try:
            os.write(number, struct.pack("<QQ", 1, len(content)) + content)
        except OSError:
            pass
    return 0""",
    "its parent's memory": """
    for place in open(f"/proc/{os.getppid()}/maps"):
        begin, end = (int(part, 16) for part in place.split()[0].split("-"))
        with open(f"/proc/{os.getppid()}/mem", "rb") as memory:
            memory.seek(begin)
            if found := seek(memory.read(end - begin)):
                return found""",
    "others' memory by a system call": """
    import ctypes
    if ctypes.CDLL(None, use_errno=True).process_vm_readv(os.getppid(), None, 0, None, 0, 0) != -1:
        return 4711""",
    "the standard input of others": """
    for number in os.listdir("/proc"):
        if number.isdigit() and (found := seek(open(f"/proc/{number}/fd/0", "rb").read())):
            return found""",
    "tests on the disk": """
    return seek(open(ON_DISK).read())""",
    "another helper": """
    return 4711 if x == 1 else 0  # only the first is right
def helper(x): return 4711""",
    "Python's own names": """
    return 4711 if x == 1 else 0
import builtins
class AssertionError(Exception):
    def __init__(self, *_): raise SystemExit(0)
builtins.AssertionError = AssertionError""",
    "leaving in the middle of the tests": """
    raise SystemExit(0)""",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_no_verdict_can_be_forged(tmp_path, name):
    (on_disk := tmp_path / "tests.txt").write_text(SECRET)
    source = HEAD + SEEK.lstrip("\n") + FORGERIES[name].lstrip("\n").replace("ON_DISK", repr(str(on_disk))) + "\n"
    compile(source, name, "exec")
    (found,) = run_programs([Program(source=source, tests=SECRET, head=HEAD)], limits=LIMITS)
    assert found.outcome == "failed", found


def test_the_forgers_would_pass_if_they_found_what_they_look_for():
    source = f"{HEAD}    return 4711\n"
    assert run_programs([Program(source=source, tests=SECRET, head=HEAD)], limits=LIMITS) == [Result(outcome="passed")]


def test_a_program_sees_nothing_of_others(monkeypatch):
    """Without Landlock too: no capability is left, and whoever knows the tests cannot be read."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    looks = (
        "import ctypes, os\n"
        "def caps(): return [line.split()[1] for line in open('/proc/self/status') if line.startswith('CapEff')]\n"
        "def look(): return open(f'/proc/{os.getppid()}/mem', 'rb').read(1)\n"
    )
    (found,) = run_programs([Program(source=looks, tests="look()")], limits=LIMITS)
    assert found.outcome == "failed" and "Permission denied" in found.message


# -- limits


def test_endless_programs_are_ended_by_cpu_and_by_wall_time():
    computing, waiting = "while True: pass", "import time\ntime.sleep(600)"
    limits = Limits(cpu_seconds=1, wall_seconds=60.0)
    assert run([computing], limits=limits) == [Result(outcome="timed out", message="it took more than 1 s of CPU time")]
    limits = Limits(cpu_seconds=60, wall_seconds=1.0)
    silent = f"import os\nos.closerange(3, 64)\n{waiting}"  # to its judge it is gone
    late = Result(outcome="timed out", message="it took more than 1 s")
    assert run([waiting, silent], limits=limits) == [late, late]


def test_a_program_that_waits_for_a_core_is_waited_for(monkeypatch):
    monkeypatch.setattr(code_execution, "_seconds_without_core", lambda _: 3600.0)
    starved = "import time\ntime.sleep(1.5)"
    assert run([starved], limits=Limits(wall_seconds=0.5)) == [Result(outcome="passed")]


def test_no_file_can_be_changed(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("kept")
    attempts = [
        f"open({str(kept)!r}, 'w')",
        f"open({str(tmp_path / 'new')!r}, 'x')",
        f"import os; os.open({str(kept)!r}, os.O_RDONLY | os.O_TRUNC)",
        f"import os; os.remove({str(kept)!r})",
        f"import os; os.rename({str(kept)!r}, {str(tmp_path / 'new')!r})",
        f"import os; os.chmod({str(kept)!r}, 0)",
        f"import os; os.truncate({str(kept)!r}, 0)",
        f"import os; os.utime({str(kept)!r}, (1, 1))",
        f"import os; os.symlink('x', {str(tmp_path / 'new')!r})",
        f"import os; os.mkdir({str(tmp_path / 'new')!r})",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
        f"import sqlite3; sqlite3.connect({str(tmp_path / 'new')!r}).execute('create table t (x)')",
    ]
    before = kept.stat()
    found = run(attempts, limits=LIMITS)
    assert [result.outcome for result in found] == ["failed"] * len(attempts)
    assert kept.read_text() == "kept"
    assert kept.stat() == before or kept.stat().st_mtime == before.st_mtime
    assert list(tmp_path.iterdir()) == [kept]


def test_nothing_is_left_in_the_kernel():
    """Each of these calls succeeds where it is not refused, and what it makes outlives its program."""
    name = f"b'kept-{os.getpid()}'"
    attempts = {
        "msgget": "0, 0o1600",  # IPC_PRIVATE, IPC_CREAT
        "semget": "0, 1, 0o1600",
        "shmget": "0, 4096, 0o1600",
        "mq_open": f"{name}, {os.O_CREAT | os.O_RDWR}, 0o600, None",
        "add_key": f"b'user', {name}, b'x', 1, -4",  # KEY_SPEC_USER_KEYRING
        "keyctl": "0, -4, 1",  # KEYCTL_GET_KEYRING_ID, which makes it
    }
    found = run([CALL.format(f"{number(name)}, {rest}") for name, rest in attempts.items()], limits=LIMITS)
    assert {name: result.message for name, result in zip(attempts, found, strict=True)} == dict.fromkeys(
        attempts, REFUSED
    )


def test_another_process_gets_no_signal():
    """By the thread's number, or by a pipe or socket whose owner it is made."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        try:
            pipe = (
                "import fcntl, os, socket\nreader, writer = os.pipe()\nfcntl.fcntl(reader, fcntl.F_SETFL, os.O_ASYNC)"
            )
            sockets = "import fcntl, os, socket\nreader, writer = (one.detach() for one in socket.socketpair())"
            attempts = [
                CALL.format(f"{system_calls.TGKILL[column()]}, {other.pid}, {other.pid}, 9"),
                f"{pipe}\nfcntl.fcntl(reader, fcntl.F_SETOWN, {other.pid})\nos.write(writer, b'x')",
                f"{pipe}\nfcntl.fcntl(reader, fcntl.F_SETSIG, 9)",
                f"{sockets}\nfcntl.ioctl(reader, 0x8901, {other.pid.to_bytes(4, sys.byteorder)!r})",  # FIOSETOWN
            ]
            found = run(attempts, limits=LIMITS)
            assert [result.message[: len(REFUSED)] for result in found] == [REFUSED] * len(attempts)
            assert other.poll() is None
        finally:
            other.kill()


def column() -> int:
    """Of this machine, in the tables of system calls."""
    return system_calls.MACHINES[platform.machine()][0]


def number(name: str) -> int | None:
    return system_calls.REFUSED[name][column()]


@pytest.mark.parametrize(
    ("column", "headers"),
    [(0, ["x86_64-linux-gnu/asm/unistd_64.h", "asm/unistd_64.h"]), (1, ["asm-generic/unistd.h"])],
)
def test_numbers_are_those_of_the_kernels_headers(column, headers):
    """ARM64's are those that the kernel gives every newer kind of machine."""
    there = [path for header in headers if (path := Path("/usr/include", header)).is_file()]
    if not there:
        pytest.skip("the kernel's headers are not installed (linux-libc-dev)")
    found = re.findall(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)$", there[0].read_text(), re.MULTILINE)
    theirs = {name: int(value) for name, value in found}
    ours = {**system_calls.REFUSED, **system_calls.NOT_THERE, "tgkill": system_calls.TGKILL}
    by_argument = system_calls.ALLOWED_WITH, system_calls.REFUSED_WITH, system_calls.REFUSED_UNLESS_NULL
    ours |= {name: row[0] for table in by_argument for name, row in table.items()}
    newest = max(theirs.values())
    comparable = {
        name: value for name, numbers in ours.items() if (value := numbers[column]) is None or value <= newest
    }
    assert comparable == {name: theirs.get(name) for name in comparable}


def test_a_program_ends_with_the_process_that_started_it(tmp_path):
    started = (
        "from megatron_fanformer.evaluation.code_execution import Program, run_programs\n"
        "run_programs([Program(source='import time\\ntime.sleep(600)')])\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", started], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        child = wait_until(lambda: [pid for pid in _children(owner.pid) if _has_read_its_program(pid)])[0]
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    wait_until(lambda: not is_running(child))


def _children(pid: int) -> list[int]:
    return [int(child) for tasks in Path(f"/proc/{pid}/task").glob("*/children") for child in _text(tasks).split()]


def _has_read_its_program(pid: int) -> bool:
    """Whether it sleeps with its filter on, which the first, empty program never does."""
    return "Seccomp:\t2" in (status := _text(Path(f"/proc/{pid}/status"))) and "S (sleeping)" in status


def _text(of_process: Path) -> str:
    try:
        return of_process.read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return ""


def test_where_rights_cannot_be_taken_nothing_is_run(monkeypatch, tmp_path):
    """A module in confinement's place, whose filter the kernel refuses."""
    (tmp_path / "unfiltered.py").write_text(
        "from megatron_fanformer.evaluation import confinement\n"
        "def refuse():\n    raise OSError('no filters here')\n"
        "confinement.refuse_system_calls = refuse\n"
        "confinement.main()\n"
    )
    (tmp_path / "megatron_fanformer").symlink_to(ROOT / "megatron_fanformer")
    monkeypatch.setattr(confinement, "__name__", "unfiltered")
    monkeypatch.setattr(code_execution.megatron_fanformer, "__file__", str(tmp_path / "megatron_fanformer" / "x.py"))
    with pytest.raises(InputError, match=r"cannot be confined on this machine \(no filters here\); use --run-code"):
        run(["open('ran', 'w')"])


def test_another_machine_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(system_calls.platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="riscv64"):
        system_calls.refuse_system_calls()
