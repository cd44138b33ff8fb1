"""Messages between a judge and the program that it judges: plain values, and handles of other objects.

Values are copied as JSON, whose reader makes plain values alone, whatever the other side sends: a list or a number of
the program's own class, which could compare as it likes, arrives as a list or a number. What cannot be copied stays
where it is, and is spoken of by a number.
"""

import json
import numbers
import os
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from megatron_fanformer.processes import read_message, write_message

MOST_BYTES = 1 << 28
"""The most bytes of a message: what a program returns must not exhaust the judge's memory."""


class Gone(Exception):
    """The other side has ended."""


class Channel:
    """Messages over two pipes."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = os.fdopen(reader, "rb"), os.fdopen(writer, "wb")

    def send(self, message: Any) -> None:
        """Send a message of JSON's values.

        Raises:
            Gone: nobody reads it.
        """
        try:
            write_message(self._writer, json.dumps(message).encode())
        except OSError:
            raise Gone from None

    def receive(self) -> Any:
        """Wait for a message.

        Raises:
            Gone: there is none any more.
            ValueError: it is not one.
        """
        if (parts := read_message(self._reader, most_bytes=MOST_BYTES)) is None:
            raise Gone
        (content,) = parts
        return json.loads(content)


def encoded(value: Any, handle: Callable[[Any], Any]) -> list[Any]:
    """Return a value as JSON's, its kind first; `handle` gives what stands for one that is not plain."""
    if value is None or value is Ellipsis:
        return ["none" if value is None else "ellipsis", None]
    if isinstance(value, bool) or type(value).__name__ == "bool_":
        return ["bool", bool(value)]
    if isinstance(value, str):
        return ["str", [ord(character) for character in value] if _has_surrogates(value) else str.__str__(value)]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    for number in (Decimal, Fraction):
        if isinstance(value, number):
            return [number.__name__, str(value)]
    if isinstance(value, numbers.Integral):
        return ["int", hex(int(value))]
    if isinstance(value, numbers.Real):
        return ["float", float(value).hex()]
    if isinstance(value, complex):
        return ["complex", [value.real.hex(), value.imag.hex()]]
    if isinstance(value, range):
        return ["range", [value.start, value.stop, value.step]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            items: Any = kind.__iter__
            return [kind.__name__, [encoded(item, handle) for item in items(value)]]
    if isinstance(value, dict):
        return ["dict", [[encoded(key, handle), encoded(item, handle)] for key, item in dict.items(value)]]
    return ["handle", handle(value)]


def decoded(message: Any, handle: Callable[[Any], Any]) -> Any:
    """Return the value that `encoded` has written; `handle` gives that of a handle.

    Raises:
        ValueError, TypeError, KeyError: it is none.
    """
    kind, content = message
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](decoded(item, handle) for item in content)
    if kind == "dict":
        return {decoded(key, handle): decoded(item, handle) for key, item in content}
    return handle(content) if kind == "handle" else _SCALARS[kind](content)


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in str.__iter__(text))


_CONTAINERS: dict[str, Callable[[Any], Any]] = {kind.__name__: kind for kind in (list, tuple, set, frozenset)}
_SCALARS: dict[str, Callable[[Any], Any]] = {
    "none": lambda _: None,
    "ellipsis": lambda _: Ellipsis,
    "bool": lambda content: content is True,
    "str": lambda content: content if isinstance(content, str) else "".join(map(chr, content)),
    "bytes": bytes.fromhex,
    "Decimal": Decimal,
    "Fraction": Fraction,
    "int": lambda content: int(content, 16),
    "float": float.fromhex,
    "complex": lambda content: complex(*map(float.fromhex, content)),
    "range": lambda content: range(*map(int, content)),
}
