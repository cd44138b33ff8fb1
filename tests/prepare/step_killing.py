"""Kills a preparation before each step that it takes in the file system, one after the other; run as a program.

`python -m tests.prepare.step_killing FOLDER STRIDE OPTIONS…` prepares to FOLDER/done/tokens, up to where all
shards are whole and nothing is assembled yet. A copy of that goes on in a process that kills itself before its first
step (a rename, a removal, an fsync), and again in one that is left alone; another copy until a later step, STRIDE
steps on; and so on, until one meets no further step. It prints how many were killed. All processes are forked off
this one, which has imported everything: so a step costs a tenth of a second.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

# Not used here, but by what is forked off: each of these would cost every one of them a fifth of a second.
import pyarrow.parquet  # noqa: F401
import sentencepiece  # noqa: F401

from megatron_fanformer.cli import main
from megatron_fanformer.prepare.outputs import Assembler

STEPS = ("replace", "rename", "unlink", "remove", "rmdir", "fsync")


def kill_self(*_: Any) -> None:
    """End without a word to anybody."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_before_step(number: int) -> None:
    """Have this process killed before its `number`-th step, from 1."""
    steps = count(1)

    def watched(call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **options: Any) -> Any:
            if next(steps) == number:
                kill_self()
            return call(*args, **options)

        return step

    for name in STEPS:
        setattr(os, name, watched(getattr(os, name)))


def stop_before_assembly() -> None:
    """Have nothing assembled, and this process killed when all shards are whole."""

    begin = Assembler.__init__

    def begin_late(assembler: Assembler, *arguments: Any) -> None:
        begin(assembler, *arguments)
        assembler.next_input = -1  # no shard is the next

    Assembler.__init__ = begin_late  # type: ignore[method-assign]
    Assembler.publish = kill_self  # type: ignore[method-assign, assignment]


def in_fork(prepare: list[str], before: Callable[[], None] | None = None) -> int:
    """Run `prepare` in a forked process; returns its exit code, negative for a signal."""
    process = os.fork()
    if not process:
        if before is not None:
            before()
        code = main(["prepare", *prepare])
        sys.stdout.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill_at_steps(folder: Path, stride: int, options: list[str]) -> int:
    """See the module; returns the number of processes that were killed."""
    done = folder / "done"
    assert in_fork([*options, "--output", str(done / "tokens")], stop_before_assembly) == -signal.SIGKILL
    for killed in count():
        step = 1 + killed * stride
        trial = folder / f"{step:03d}"
        shutil.copytree(done, trial)
        command = [*options, "--output", str(trial / "tokens")]
        code = in_fork(command, partial(kill_before_step, step))
        if code == 0:
            return killed
        assert code == -signal.SIGKILL, code
        assert in_fork(command) == 0
    raise AssertionError


if __name__ == "__main__":
    print(kill_at_steps(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
