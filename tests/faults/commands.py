"""Runs commands in this process, with a limit of time, and keeps their output."""

import contextlib
import io
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType

from megatron_fanformer.cli import PROGRAM, main
from tests.patience import PATIENCE_SECONDS
from tests.small_runs import collect_groups


class Hang(BaseException):
    """A command did not end in time; nothing in the package catches it."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    output: str
    errors: str

    def unlike(self, codes: Sequence[int], *, most_lines: int) -> str | None:
        """What a user must not see of it, if anything."""
        lines = self.errors.rstrip("\n").split("\n") if self.errors else []
        if self.code not in codes:
            return f"exit code {self.code}"
        if "Traceback" in self.output + self.errors or "--debug shows where" in self.errors:
            return "Python's own words"
        if self.code and not 0 < len(lines) <= most_lines:
            return f"{len(lines)} lines"
        if self.code and not all(line.startswith(f"{PROGRAM}: ") and len(line) > len(PROGRAM) + 10 for line in lines):
            return "a line that says nothing"
        return None


@contextlib.contextmanager
def in_time(seconds: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Raise Hang in the block once it takes longer; not while a library's own code is running."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def unheard() -> Iterator[None]:
    """Without pytest's own log handlers: to its end a test would keep every error, and by its traceback the model."""
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, [logging.NullHandler()]
    try:
        yield
    finally:
        root.handlers = handlers


def run(arguments: Sequence[str], seconds: float = PATIENCE_SECONDS) -> Ended:
    """Run one command."""
    output, errors = io.StringIO(), io.StringIO()
    folder = os.getcwd()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors), unheard(), in_time(seconds):
        try:
            code = main(arguments)
        except SystemExit as exit:  # of --help and --version
            code = int(exit.code or 0)
    assert os.getcwd() == folder
    collect_groups()
    return Ended(code, output.getvalue(), errors.getvalue())
