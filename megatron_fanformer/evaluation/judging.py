"""The judge of a program: a confined process of its own, which runs the tests and queries the program's for its values.

The program's process never sees the tests, and has nothing by which it could report a verdict. Names that the tests
use and that neither Python nor the document's own text has are the program's: its functions are called there, with
copies of the arguments, and what they return is copied here and compared here. What cannot be copied, such as an object
of the program's own class, stays there, and equals nothing but itself.
"""

import ast
import builtins
import importlib
import json
import os
import sys
from collections.abc import Collection, Iterator
from typing import Any

from megatron_fanformer.evaluation.confinement import MOST_REPORTED, close_streams, confine, error_text
from megatron_fanformer.evaluation.exchange import Channel, Gone, decoded, encoded
from megatron_fanformer.processes import end_with_owner

PASSED, FAILED, UNCONFINED, GONE = "passed", "failed", "unconfined", "gone"
"""The reports: two verdicts; confinement failed and nothing was run; the program ended itself."""


def main() -> None:
    """Judge by the tests in the standard input: the fields of a `Program` but its source, as JSON.

    Arguments: the owner's process id, the pipes from and to the program's process, the file to write the verdict to,
    bytes of memory, seconds of CPU time, the folder that may be read.
    """
    owner, reader, writer, report, memory_bytes, cpu_seconds = map(int, sys.argv[1:7])
    end_with_owner(owner)
    given = json.loads(sys.stdin.buffer.read())
    close_streams()
    try:
        confine(memory_bytes, cpu_seconds, sys.argv[7])
    except (OSError, ValueError) as error:
        kind, text = UNCONFINED, str(error)
    else:
        kind, text = _verdict(Channel(reader, writer), given)
    with os.fdopen(report, "wb") as stream:
        stream.write(json.dumps([kind, text[:MOST_REPORTED]]).encode())
    os._exit(0)


def _verdict(channel: Channel, given: dict[str, Any]) -> tuple[str, str]:
    try:
        first = channel.receive()  # before the program has begun
        if first != "confined":
            return UNCONFINED, str(first)
        if (wrong := channel.receive()) is not None:
            return FAILED, str(wrong)
        names = _Names(_Program(channel), _names_before(given["head"]), given["own_names"])
        exec(compile(given["tests"], "<tests>", "exec"), names)
    except Gone:
        return GONE, ""
    except BaseException as error:
        return FAILED, error_text(error)
    return PASSED, ""


def _names_before(head: str) -> dict[str, Any]:
    """Define what the document's text has before the function that the model writes, as the tests use it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        *before, _ = ast.parse(f"{head}\n    pass\n").body
    except (SyntaxError, ValueError):
        return names
    exec(compile(ast.Module(before, []), "<head>", "exec"), names)
    return names


class _Names(dict[str, Any]):
    """The tests' global names: their own first, then Python's, then the program's."""

    def __init__(self, program: "_Program", own: dict[str, Any], of_program: Collection[str]) -> None:
        super().__init__(own)
        self._program, self._of_program = program, of_program

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) and name not in self._of_program:
            raise KeyError(name)
        return self._program.query("name", name)


class _Program:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def query(self, what: str, *arguments: Any) -> Any:
        """Return the value that the program's process answers with.

        Raises:
            Gone: it has ended.
            Exception: what it raised, of Python's own classes.
        """
        plain = [encoded(argument, self._handle) for argument in arguments]
        self._channel.send([what, plain])
        kind, value, *after = self._channel.receive()
        if kind == "raised":
            raise _exception(*map(str, value))
        if kind == "module" and what == "name":
            return _module(str(value))
        for argument, changed in zip(arguments[1] if what == "call" else (), after[0] if after else (), strict=False):
            _update(argument, decoded(changed, self._remote))
        return decoded(value, self._remote)

    def _remote(self, handle: Any) -> "Remote":
        return Remote(self, int(handle))

    @staticmethod
    def _handle(value: Any) -> int:
        if isinstance(value, Remote):
            return _number_of(value)
        raise TypeError(f"a test gives the program a {type(value).__name__}, which cannot be copied")


def _exception(name: str, text: str) -> Exception:
    kind = getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = RuntimeError
    try:
        return kind(text)
    except TypeError:  # of one that takes more than a text
        return RuntimeError(f"{name}: {text}")


def _module(name: str) -> Any:
    """Return a module of Python's own, which the program has imported and the tests use."""
    if name.partition(".")[0] not in sys.stdlib_module_names:
        raise NameError(f"{name} is not one of Python's modules")
    return importlib.import_module(name)


def _update(argument: Any, changed: Any) -> None:
    if type(argument) is type(changed) and argument != changed:
        if isinstance(argument, list):
            argument[:] = changed
        elif isinstance(argument, dict | set):
            argument.clear()
            argument.update(changed)


class Remote:
    """An object that stayed in the program's process; what is done with it here is done there."""

    def __init__(self, program: _Program, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it there."""
        return self._query("call", list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._query("attribute", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._query("set", name, value)

    def __iter__(self) -> Iterator[Any]:
        items = self._query("iterate")
        while (found := items._query("next")) is not None:
            yield found[0]

    def __next__(self) -> Any:
        if (found := self._query("next")) is None:
            raise StopIteration
        return found[0]

    def __len__(self) -> int:
        return int(self._query("len"))

    def __bool__(self) -> bool:
        return self._query("bool") is True

    def __getitem__(self, key: Any) -> Any:
        return self._query("item", key)

    def __str__(self) -> str:
        return str(self._query("str"))

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and _number_of(self) == _number_of(other)

    def __hash__(self) -> int:
        return _number_of(self)

    def _query(self, what: str, *arguments: Any) -> Any:
        return object.__getattribute__(self, "_program").query(what, self, *arguments)


def _number_of(remote: Remote) -> int:
    """Return its number in the program's process, past what `Remote` makes of attributes."""
    return int(object.__getattribute__(remote, "_number"))


if __name__ == "__main__":
    main()
