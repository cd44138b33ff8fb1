"""A confined process: it drops its own rights, then runs one program and answers its judge.

It reads nothing from the package but this file's neighbours, so that it starts in a fraction of a second. The judge,
which knows the tests, is another process (`judging.py`): whatever the program finds in its own, the verdict is not
there.
"""

import operator
import os
import resource
import signal
import sys
import types
from collections.abc import Callable
from typing import Any

from megatron_fanformer.evaluation.exchange import Channel, Gone, decoded, encoded
from megatron_fanformer.evaluation.readable_files import refuse_files, refuse_inspection
from megatron_fanformer.evaluation.system_calls import refuse_system_calls
from megatron_fanformer.processes import end_with_owner

MOST_REPORTED = 300  # characters of an error
MOST_OPEN_FILES = 64


def main() -> None:
    """Run the program of the standard input, then answer requests.

    Arguments: the owner's process id, the pipes from and to the judge, bytes of memory, seconds of CPU time, the
    program's home.
    """
    owner, reader, writer, memory_bytes, cpu_seconds = map(int, sys.argv[1:6])
    home = sys.argv[6]
    end_with_owner(owner)
    source = sys.stdin.buffer.read()
    close_streams()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner's affair
    # A module of its own, so that the program finds nothing of this one by its name.
    module = types.ModuleType("__main__")
    sys.argv, sys.modules["__main__"] = ["program"], module
    channel = Channel(reader, writer)
    try:
        confine(memory_bytes, cpu_seconds, home)
    except (OSError, ValueError) as error:
        channel.send(str(error))
        os._exit(0)
    try:
        channel.send("confined")
        channel.send(_run(source, module))
        _Answers(channel, module).give()
    except Gone:
        pass
    os._exit(0)  # whatever threads and exit handlers the program has left


def close_streams() -> None:
    """Discard what is printed, and leave nothing to read."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_RDWR), stream.fileno())


def confine(memory_bytes: int, cpu_seconds: int, home: str) -> None:
    """Drop this process's rights for good.

    Raises:
        OSError, ValueError: they cannot be taken here.
    """
    for what, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, MOST_OPEN_FILES),
    ):
        resource.setrlimit(what, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))  # SIGXCPU, then SIGKILL
    refuse_inspection()
    refuse_files(home)
    refuse_system_calls()


def error_text(error: BaseException) -> str:
    """Return an error's name and text, on one line that can be written as UTF-8."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:MOST_REPORTED]
    return text.encode(errors="replace").decode()


def _run(source: bytes, module: types.ModuleType) -> str | None:
    """Run the program; return what went wrong, or None where it reached its end."""
    try:
        exec(compile(source, "<program>", "exec"), module.__dict__)
    except BaseException as error:  # SystemExit too: a program that leaves has not reached its end
        return error_text(error)
    return None


class _Answers:
    def __init__(self, channel: Channel, module: types.ModuleType) -> None:
        self._channel, self._module = channel, module
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def give(self) -> None:
        """Answer until there are no more queries; raises Gone then."""
        while True:
            what, plain = self._channel.receive()
            try:
                answer = self._answer(what, [decoded(argument, self._objects.__getitem__) for argument in plain])
            except BaseException as error:
                answer = ["raised", [type(error).__name__, str(error)[:MOST_REPORTED]]]
            self._channel.send(answer)

    def _answer(self, what: str, arguments: list[Any]) -> list[Any]:
        if what == "name":
            try:
                value = self._module.__dict__[arguments[0]]
            except KeyError:
                raise NameError(f"name {arguments[0]!r} is not defined") from None
            if isinstance(value, types.ModuleType):
                return ["module", value.__name__]
            return ["returned", encoded(value, self._number)]
        owner, *rest = arguments
        if what == "call":
            positional, named = rest
            value = owner(*positional, **named)
            return ["returned", encoded(value, self._number), [encoded(one, self._number) for one in positional]]
        return ["returned", encoded(_ACTIONS[what](owner, *rest), self._number)]

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._objects.append(value)  # and so it keeps its id
            self._numbers[id(value)] = len(self._objects) - 1
        return self._numbers[id(value)]


class _Iterator:
    """An iterator that is not a plain value, whatever it iterates over."""

    def __init__(self, items: Any) -> None:
        self._items = items

    def __iter__(self) -> Any:
        return self._items


_ACTIONS: dict[str, Callable[..., Any]] = {
    "attribute": getattr,
    "set": setattr,
    "iterate": lambda owner: _Iterator(iter(owner)),
    "next": lambda owner: next(([item] for item in owner), None),
    "item": operator.getitem,
    "len": len,
    "bool": bool,
    "str": str,
}


if __name__ == "__main__":
    main()
