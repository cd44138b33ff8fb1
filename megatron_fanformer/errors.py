"""The errors with their exit codes; every package may raise them, and only `cli` turns them into an exit.

A message is one line of the form `VALUE, RULE; REMEDY`: the value, the rule that it breaks, the way out. It shows
no credentials: see `redacted`.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")

_USERINFO = re.compile(r"://([^\s/@]*|[^\s/:@]*:[^\s@]*)@")


def redacted(text: str) -> str:
    """Return a text without the users and passwords in its URLs."""
    return _USERINFO.sub("://…@", text)


class FanformerError(Exception):
    """A failure that is reported to the user in one line, without a traceback.

    Each kind can be made of its message alone: pickle does so where one leaves a process.
    """

    exit_code = 1
    already_reported = False
    """Whether it is another rank's error, raised here too so that this one ends the same way: not printed again."""


class InputError(FanformerError, ValueError):
    """The user's input is wrong: a configuration, a path, an option, a document."""

    exit_code = 2


class InUseError(InputError):
    """A live process holds a run's folder or an output that this one needs."""


class CorruptError(FanformerError):
    """Data or a checkpoint is damaged, or fails its verification."""

    exit_code = 3


class DivergenceError(FanformerError):
    """The numbers went bad: a loss or a gradient norm that is not finite."""

    exit_code = 4


class Interrupted(FanformerError):
    """Stopped on a signal, and no step is lost; the same command continues from there."""

    exit_code = 5
    is_final = False
    """Whether it ended this process at once: other ranks do not save, either."""


def escaped(text: str) -> str:
    """Return untrusted text, safe for a terminal: control characters are escaped, line ends and tabs kept."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def collect_problems(problems: list[str], read: Callable[[], _T]) -> _T | None:
    """Call `read()`. On InputError append its lines to `problems` and return None."""
    try:
        return read()
    except InputError as error:
        problems += str(error).splitlines()
        return None


def broken_fields(
    section: str, values: object, demand: str, is_broken: Callable[[Any], bool], *names: str
) -> list[str]:
    """Return a line for each of those fields of a section that breaks a rule of single fields; null breaks none.

    Args:
        demand: the rule, as in "be at least 1".
    """
    stated = {name: getattr(values, name) for name in names}
    return [
        f"{section}.{name} is {value}; it must {demand}"
        for name, value in stated.items()
        if value is not None and is_broken(value)
    ]


def did_you_mean(name: str, known: Iterable[str], otherwise: str, *, prefix: str = "") -> str:
    """Return the remedy for an unknown name: the known one most like it.

    Args:
        otherwise: the remedy where none is: one that has nothing in common would be taken for an answer.
        prefix: of the known names, where they are shown.
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {prefix}{near[0]}?" if near else otherwise
