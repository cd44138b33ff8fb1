"""What is wrong with the plain values of a configuration, before anything is built of them, in the user's words.

jsonargparse decides whether a value fits a field's type; it stops at the first that does not, and speaks of types. Here
every field is tried, and each that fails gets its line.
"""

import dataclasses
import difflib
import json
import math
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser

IN_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    str: "text",
    list: "a list of text, such as [a, b]",
    dict: "a mapping to lists of text, such as {name: [a, b]}",
    NoneType: "null",
}


def without_empty_sections(values: dict[str, Any]) -> dict[str, Any]:
    """YAML reads a section whose lines are all commented out as null: it has its defaults."""
    return {name: value for name, value in values.items() if value is not None}


def value_problems(values: dict[str, Any], owner: type, prefix: str = "") -> Iterator[str]:
    """A line for each key that the dataclass does not have, each missing one, and each value of a wrong type."""
    hints = get_type_hints(owner)
    yield from _unknown_keys(values, hints, prefix)
    for field in dataclasses.fields(owner):
        name, hint = prefix + field.name, hints[field.name]
        required = field.default is field.default_factory is dataclasses.MISSING
        present = field.name in values
        value = values.get(field.name)
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            if isinstance(value, dict) or (required and not present):
                yield from value_problems(value or {}, hint, f"{name}.")
            elif present:
                yield f"{name} is {_shown(value)}; it must be a section with keys such as {_first_key(hint)}"
        elif required and not present:
            yield f"{name} is missing; it must be {_in_words(hint)}"
        elif present and not _fits(value, hint):
            yield f"{name} is {_shown(value)}; it must be {_in_words(hint)}"


def _unknown_keys(values: dict[str, Any], known: dict[str, Any], prefix: str) -> Iterator[str]:
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)
            yield f"unknown configuration key {prefix}{key}; did you mean {prefix}{near[0]}?"


def _fits(value: Any, hint: Any) -> bool:
    if value is None:  # jsonargparse takes it for a value that was not given
        return NoneType in get_args(hint)
    if isinstance(value, bool) and hint in (int, float):
        return False
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    try:
        parsed = parser.parse_object({"value": value}).value
    except Exception:  # of whatever class the type's check raises
        return False
    return not isinstance(parsed, float) or math.isfinite(parsed)


def _in_words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return ", or ".join(_in_words(choice) for choice in get_args(hint))
    return IN_WORDS[get_origin(hint) or hint]


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _first_key(owner: type) -> str:
    return dataclasses.fields(owner)[0].name
