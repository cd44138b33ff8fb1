"""Defines the errors that end a command, with their exit codes, and composes their messages.

A message is one line, `VALUE, RULE; REMEDY`: the wrong value, the rule that it breaks, and how to mend it. Every room
may raise these errors; only `cli` turns them into an exit, and removes the credentials from their messages.
"""

import difflib
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")

_USERINFO = re.compile(r"://([^\s/@]*|[^\s/:@]*:[^\s@]*)@")  # a user, or a user and a password, which may contain "/"


def redacted(text: str) -> str:
    """Return a text without the users and passwords in its URLs."""
    return _USERINFO.sub("://…@", text)


class FanformerError(Exception):
    """A failure that is reported to the user in one line, without a traceback.

    Subclasses must be constructible from the message alone: that is how pickle passes an error to another process.
    """

    exit_code = 1
    already_reported = False
    """Whether another rank has printed this error, so that this rank only ends with the same exit code."""


class InputError(FanformerError, ValueError):
    """The user's input is wrong: a configuration, a path, an option, a document."""

    exit_code = 2


class InUseError(InputError):
    """Another live process is using the run's folder or the output."""


class CorruptError(FanformerError):
    """Data or a checkpoint is damaged, or fails its verification."""

    exit_code = 3


class DivergenceError(FanformerError):
    """A loss or a gradient norm is not finite."""

    exit_code = 4


class Interrupted(FanformerError):
    """A signal stopped the command; no step is lost, and the same command continues from there."""

    exit_code = 5
    is_final = False
    """Whether this process ended at once, without a save; then the other ranks do not save, either."""


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
    """Return one line for each of the named fields whose value breaks a rule; None breaks no rule.

    Args:
        values: the dataclass of the section named `section`.
        demand: the rule in words, such as "be at least 1".
    """
    return [
        f"{section}.{name} is {value}; it must {demand}"
        for name in names
        if (value := getattr(values, name)) is not None and is_broken(value)
    ]


def did_you_mean(name: str, known: Iterable[str], otherwise: str, *, prefix: str = "") -> str:
    """Return "did you mean NAME?" with the known name most similar to `name`, or `otherwise` if none is similar.

    Args:
        prefix: text to show before the known name.
    """
    similar = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {prefix}{similar[0]}?" if similar else otherwise
