"""What signals do to a process before a run's loop listens to them, and the end of children with their parents."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_fanformer.processes import (
    NOTHING_LOST,
    STOP_SIGNALS,
    manual_gc,
    seconds_since_start,
    signals_held,
    usable_cores,
)
from tests.patience import PATIENCE_SECONDS, is_running, wait_until
from tests.small_runs import ROOT, small_run, start_command, write_config, write_tokens

WAITS_IN_A_LIBRARY = """
import ctypes, sys
from megatron_fanformer.processes import ended_by_stop_signals
with ended_by_stop_signals(lambda line: print(line, flush=True)):
    print("ready", flush=True)
    while True:
        ctypes.CDLL(None).usleep(999_999)
        ctypes.CDLL(None).usleep(999_999)
"""
LISTENS = """
import os, signal
from megatron_fanformer.processes import ended_by_stop_signals, signals_to
heard = []
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
with ended_by_stop_signals(print):
    with signals_to(heard.append):
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
    if (child := os.fork()) == 0:
        os.kill(os.getpid(), signal.SIGTERM)  # not its parent's
        os._exit(7)
    print([number.name for number in heard], os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
IS_OVER = """
import os, signal, threading, time
from megatron_fanformer.processes import STOP_SIGNALS, ended_by_stop_signals, hold_signals, signals_to
def send():
    for number in (*STOP_SIGNALS, signal.SIGUSR2):
        os.kill(os.getpid(), number)
    time.sleep(0.2)
hold_signals()
heard = []
with ended_by_stop_signals(print):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()  # a library's, which holds no signal
    with signals_to(heard.append, is_last=True):
        send()
    send()
send()
print(len(heard))
"""
"""A run whose last step is over."""
LEAVES_A_CHILD = """
import os, subprocess, sys, time
code = "import sys, time; from megatron_fanformer.processes import end_with_owner; end_with_owner(int(sys.argv[1]))"
code += "; print('ready', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code, sys.argv[1] if len(sys.argv) > 1 else str(os.getpid())])
print(child.pid, flush=True)
child.wait()
print("ended", flush=True)
time.sleep(60)
"""

SIGNALS_ITSELF = """
import os, signal, sys
class Finder:
    def find_spec(self, name, *_):
        if name == os.environ.get("SIGNAL_AT"):
            os.kill(os.getpid(), signal.SIGUSR1)
sys.meta_path.insert(0, Finder())
"""
"""As `sitecustomize`: a signal at the moment when a module is about to be imported."""
MOMENTS = ("megatron_fanformer.cli", "argparse", "megatron_fanformer.runtime.launch", "yaml")
LATE_MOMENTS = ("torch", "megatron.core", "megatron_fanformer.train.trainer", "megatron.core.optimizer")
STOPPED = f"stopped on SIGUSR1 {NOTHING_LOST}"


def ignore_no_signal() -> None:
    """As these tests themselves may, in a shell's background or under nohup."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def start(code: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=ignore_no_signal)


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_signal_at_the_start_ends_a_process_at_once_with_a_line(number: signal.Signals) -> None:
    process = start(WAITS_IN_A_LIBRARY)
    assert line_of(process) == "ready"
    process.send_signal(signal.SIGUSR2)  # there is nothing to save yet
    process.send_signal(number)
    message, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, message) == (5, f"stopped on {number.name} {NOTHING_LOST}\n")


@pytest.mark.parametrize(
    "module", [*MOMENTS, *(pytest.param(module, marks=pytest.mark.full) for module in LATE_MOMENTS)]
)
def test_a_signal_while_a_run_is_imported_ends_it_with_a_line(module: str, tmp_path: Path) -> None:
    """From the first line of `__main__`: to a rank of Slurm's, an exit code of 138 would be a failure."""
    (tmp_path / "sitecustomize.py").write_text(SIGNALS_ITSELF)
    file = write_config(tmp_path / "config.yaml", small_run(write_tokens(tmp_path / "tokens"), tmp_path / "run"))
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "SIGNAL_AT": module}
    process = start_command("train", "--config", str(file), environment=environment)
    message, errors = process.communicate(timeout=PATIENCE_SECONDS)
    begun = "starting 1 rank on this machine\n" if module in LATE_MOMENTS else ""
    assert (process.returncode, message, errors) == (5, begun, f"megatron-fanformer: {STOPPED}\n")


def test_a_signal_before_python_runs_is_held_where_the_parent_saw_to_it(tmp_path: Path) -> None:
    file = write_config(tmp_path / "config.yaml", small_run(write_tokens(tmp_path / "tokens"), tmp_path / "run"))
    with signals_held():
        process = start_command("train", "--config", str(file))
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, errors) == (5, f"megatron-fanformer: {STOPPED}\n")


def test_verbs_that_answer_no_signal_end_by_it_as_ever(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SIGNALS_ITSELF)
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}", "SIGNAL_AT": "yaml"}
    process = start_command("config", environment=environment)
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == -signal.SIGUSR1


@pytest.mark.parametrize(
    ("code", "heard"), [(LISTENS, "['SIGTERM', 'SIGUSR2', 'SIGTERM'] 7"), (IS_OVER, f"{len(STOP_SIGNALS) + 1}")]
)
def test_the_loop_takes_signals_over_until_it_ends_and_a_child_keeps_its_own(code: str, heard: str) -> None:
    process = start(code)
    message, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, message) == (0, f"{heard}\n")


def test_a_child_ends_with_its_parent_also_if_that_has_ended_before() -> None:
    parent = start(LEAVES_A_CHILD)
    pid = int(line_of(parent))
    assert line_of(parent) == "ready"
    parent.kill()
    wait_until(lambda: not is_running(pid))
    parent.communicate()
    with start(LEAVES_A_CHILD, "1") as parent:  # the owner that the child is told is not its parent any more
        assert int(line_of(parent)) and line_of(parent) == "ended"
        parent.kill()


TICK_SECONDS = 2 / os.sysconf("SC_CLK_TCK")  # both ages are counted in whole ticks


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux shows it there")
def test_the_age_of_a_process_is_told() -> None:
    before = time.monotonic()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    after = time.monotonic()  # it has started between the two, whatever else has run
    try:
        time.sleep(0.2)
        youngest = time.monotonic() - after
        age = seconds_since_start(process.pid)
        assert youngest - TICK_SECONDS < age < time.monotonic() - before + TICK_SECONDS
        assert seconds_since_start(os.getpid()) > seconds_since_start(process.pid)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("text", "cores"), [("300000 100000\n", 3), ("150000 100000\n", 1), ("max 100000\n", 16), (None, 16)]
)
def test_a_containers_quota_counts(
    text: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    file = tmp_path / "cpu.max"
    if text is not None:
        file.write_text(text)
    assert usable_cores(file) == cores


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_collects_by_itself_again_when_it_is_over(fails: bool) -> None:
    frozen = gc.get_freeze_count()
    try:
        with manual_gc():
            assert not gc.isenabled()
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert gc.isenabled() and gc.get_freeze_count() <= frozen  # what these tests froze for themselves
