"""Signals, and the end of children with their parents."""

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
    signals_to,
    usable_cores,
)
from tests.patience import PATIENCE_SECONDS, is_running, wait_until

WORKS = """
import time
from megatron_fanformer.errors import Interrupted
from megatron_fanformer.processes import ended_by_stop_signals
try:
    with ended_by_stop_signals():
        print("ready", flush=True)
        time.sleep(600)
except Interrupted as error:
    print(error)
"""
LISTENS = """
import os, signal
from megatron_fanformer.processes import ended_by_stop_signals, signals_to
heard = []
signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
with ended_by_stop_signals():
    with signals_to(heard.append):
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
    print([number.name for number in heard])
"""
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


def ignore_no_signal() -> None:
    """As these tests themselves may, in a shell's background or under nohup."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def start(code: str, *arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=ignore_no_signal)


def test_a_signal_that_was_held_back_before_there_was_a_handler_arrives() -> None:
    heard, former, interrupt = [], signal.getsignal(signal.SIGUSR1), signal.default_int_handler
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    signal.raise_signal(signal.SIGUSR1)  # to this thread: others of this process hold nothing back
    with pytest.raises(KeyboardInterrupt), signals_to(lambda number: heard.append(number) or interrupt(number, None)):
        pass
    assert heard == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) == former  # although the handler raised an error


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_signal_to_stop_ends_work_by_an_error(number: signal.Signals) -> None:
    process = start(WORKS)
    assert line_of(process) == "ready"
    process.send_signal(signal.SIGUSR2)  # there is nothing to save yet
    process.send_signal(number)
    message, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert message == f"stopped on {number.name} {NOTHING_LOST}\n"


def test_the_loop_takes_signals_over() -> None:
    message, _ = start(LISTENS).communicate(timeout=PATIENCE_SECONDS)
    assert message == "['SIGTERM', 'SIGUSR2', 'SIGTERM']\n"


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


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux shows it there")
def test_the_age_of_a_process_is_told() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        time.sleep(0.2)
        tick = 1 / os.sysconf("SC_CLK_TCK")  # ages are counted in whole ticks
        assert 0.2 - 2 * tick < seconds_since_start(process.pid) < seconds_since_start(os.getpid())
        process.kill()


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


def test_a_run_collects_by_itself_again_when_it_is_over() -> None:
    frozen = gc.get_freeze_count()
    with pytest.raises(KeyError), manual_gc():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled() and gc.get_freeze_count() <= frozen  # what these tests froze for themselves
