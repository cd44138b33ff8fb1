"""Reads configurations from YAML and JSON into dataclasses, applies overrides, and describes fields.

A configuration is a frozen, keyword-only dataclass. Its fields are values, or dataclasses in turn: its sections.
msgspec decides whether a value fits a field's type, strictly: "1" is not an integer, true is not a number. This module
refuses NaN and infinity, reports all wrong values at once, and reads the docstring below each field from the source.
"""

import ast
import copy
import dataclasses
import functools
import inspect
import json
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import InputError, did_you_mean

Config = TypeVar("Config")

TYPES: dict[Any, tuple[str, str]] = {  # the names of each type in messages: singular and plural
    int: ("an integer", "integers"),
    float: ("a finite number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("text", "text"),
    NoneType: ("null", "null"),
    Any: ("a value", "values"),
}
MOST_BYTES = 1 << 20  # size up to which an untrusted file is read

Advice = Callable[[str], str | None] | None
"""Takes an unknown name, `section.field` or an argument of the command line; returns the remedy, or None."""


# -- from plain values


def build(values: Mapping[str, Any], owner: type[Config], prefix: str = "", *, advice: Advice = None) -> Config:
    """Return an instance of the dataclass `owner`, built from nested plain values; `~/` in texts is the home directory.

    Args:
        prefix: text before the names in messages, such as `model.`.
        advice: returns the remedy for an unknown key; if None, the message names the most similar key.

    Raises:
        InputError: keys are unknown or missing, or values have a wrong type; one line each, with the dotted name.
    """
    if problems := value_problems(values, owner, prefix, advice=advice):
        raise InputError("\n".join(problems))
    return msgspec.convert(expand_home(dict(values)), owner)


def value_problems(values: Mapping[str, Any], owner: type, prefix: str = "", *, advice: Advice = None) -> list[str]:
    """Return one line for each unknown key, each missing one, and each value of a wrong type."""
    hints = get_type_hints(owner)
    problems = []
    for key in values:
        if key not in hints:
            special_remedy = advice(f"{prefix}{key}") if advice else None
            remedy = did_you_mean(str(key), hints, f"the keys here are {', '.join(hints)}", prefix=prefix)
            problems.append(f"unknown configuration key {prefix}{key}; {special_remedy or remedy}")
    for field in dataclasses.fields(owner):
        name, hint = prefix + field.name, hints[field.name]
        is_section = dataclasses.is_dataclass(hint)
        if field.name not in values and not _is_required(field):
            continue
        value = values.get(field.name, {} if is_section else None)
        if is_section and isinstance(value, Mapping):  # a missing section is reported by its missing fields
            problems += value_problems(value, hint, f"{name}.", advice=advice)
        elif field.name not in values:
            problems.append(f"{name} is missing; it must be {_type_name(hint)}")
        elif is_section or not _fits(value, hint):  # a section here is no mapping, and so has a wrong type
            shown = json.dumps(value, ensure_ascii=False, default=str)
            problems.append(f"{name} is {shown:.80}; it must be {_type_name(hint)}")
    return problems


def expand_home(value: Any) -> Any:
    """Return a value in which every text that begins with `~/` begins with the home directory instead."""
    if isinstance(value, str) and value.startswith("~/"):
        return os.path.expanduser(value)
    if isinstance(value, list | tuple):
        return [expand_home(part) for part in value]
    return {key: expand_home(part) for key, part in value.items()} if isinstance(value, dict) else value


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value has a type, and holds neither NaN nor infinity."""
    try:
        msgspec.convert(value, hint)
        json.dumps(value, allow_nan=False, skipkeys=True, default=str)  # raises ValueError for NaN and infinity
    except (msgspec.ValidationError, ValueError):
        return False
    return True


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _type_name(hint: Any, *, many: bool = False) -> str:
    """Return the name of a type, such as `a list of integers`, or with `many` the name's plural."""
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Literal:
        return ("" if many else "one of ") + ", ".join(map(str, parts))
    if kind in (Union, UnionType):
        return " or ".join(_type_name(part, many=many) for part in parts)
    if kind in (list, tuple):
        return f"{'lists' if many else 'a list'} of {_type_name(parts[0], many=True)}"
    if kind is dict:
        return f"{'mappings' if many else 'a mapping'} of names to {_type_name(parts[1], many=True)}"
    if dataclasses.is_dataclass(hint):
        return f"a section with keys such as {dataclasses.fields(hint)[0].name}"
    return TYPES[hint][many]  # a pair: singular, plural


# -- files and overrides


class _Loader(yaml.SafeLoader):
    """Reads YAML with 4e-4 as a number, which PyYAML reads as text, and refuses a mapping that has a key twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if not key.tag.endswith(":merge")]  # `<<` may stand twice
        if repeated := [key for number, key in enumerate(keys) if key in keys[:number]]:
            raise ValueError(f"{repeated[0]} stands twice in one mapping{node.start_mark}")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+|\d*\.\d+|\d+\.)[eE][-+]?\d+$"), list("-+.0123456789")
)


def yaml_value(text: str) -> Any:
    """Return the plain value of a YAML text.

    Raises ValueError if the text is not valid YAML; the message says why, on one line.
    """
    try:
        return yaml.load(text, _Loader)
    # PyYAML raises LookupError and AttributeError for a value that contradicts its tag, such as !!bool 7.
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def read_plain_values(file: Path) -> Any:
    """Return the plain values in an untrusted file: JSON if its name ends in .json, else YAML.

    Raises OSError if the file cannot be read, is no regular file or has more than 1 MiB, ValueError if it is malformed.
    """
    text = regular_file(file, most_bytes=MOST_BYTES).read_text(encoding="utf-8")
    try:
        return json.loads(text) if file.suffix == ".json" else yaml_value(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def read_values(file: Path) -> dict[str, Any]:
    """Return the sections in a user's YAML file. Raises InputError if it cannot be read, or holds no sections."""
    try:
        values = yaml_value(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); name a configuration file") from None
    except ValueError as error:
        raise InputError(f"{file} is not valid YAML ({error}); fix it") from None
    if not isinstance(values, dict):
        raise InputError(f"{file} holds no configuration; it must have sections such as model and training")
    return values


def read_overrides(arguments: Sequence[str], *, advice: Advice = None) -> dict[str, Any]:
    """Read `--section.field VALUE` and `--section.field=VALUE`; return the last value of each field by its dotted name.

    Args:
        advice: returns the remedy for an option without a dot, or None.

    Raises:
        InputError: an argument is no such option, a value is missing, or a value is not valid YAML.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        name, has_value, text = argument.partition("=")
        if name.startswith("--") and "." in name:
            value = text if has_value else next(remaining, None)
            if value is None:
                raise InputError(f"{name} has no value; write --section.field VALUE")
            try:
                values[name[2:]] = yaml_value(value)
            except ValueError:
                raise InputError(f"{name} {value!r} is not a valid YAML value; quote it") from None
        elif name.startswith("--") and advice and (remedy := advice(name)):
            problems.append(f"{name!r} is not an override (--section.field VALUE); {remedy}")
        elif name.startswith("--") or not problems:  # a word after a wrong option is probably the option's value
            problems.append(f"{name!r} is not an override; write --section.field VALUE")
    if problems:
        raise InputError("\n".join(problems))
    return values


def overlay(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of nested values with `changes`, new values by dotted names; missing sections are added."""
    merged = copy.deepcopy(dict(values))
    for name, value in changes.items():
        *path, last = name.split(".")
        section: Any = merged
        for key in path:
            if not isinstance(section.get(key), dict):
                section[key] = {}
            section = section[key]
        section[last] = copy.deepcopy(value)
    return merged


def flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values as a flat mapping by dotted names, such as `model.fan.p_ratio`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def rename_moved_fields(values: Mapping[str, Any], moves: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Rename moved fields in a copy of nested values; return the copy, and the former names that `values` had.

    Args:
        moves: current dotted names, `section.field`, by former dotted names; an empty current name drops the field. If
            a field has values by both names, the current name's value stays.
    """
    moved, former_names = copy.deepcopy(dict(values)), []
    for former, current in moves.items():
        *path, former_field = former.split(".")
        source: Any = moved
        for key in path:
            source = source.get(key) if isinstance(source, dict) else None
        if not isinstance(source, dict) or former_field not in source:
            continue
        former_names.append(former)
        value = source.pop(former_field)
        section, _, field = current.partition(".")
        if current and not (isinstance(moved.get(section), dict) and field in moved[section]):  # `current` has no value
            moved = overlay(moved, {current: value})
    return moved, former_names


# -- descriptions


class FieldDescription(NamedTuple):
    """A field of a configuration for documentation; its name is dotted."""

    name: str
    type: str
    default: str | None
    """The default as YAML writes it; None if the field is required."""
    text: str
    """The docstring below the field, on one line."""


def describe_fields(owner: Any, prefix: str = "") -> Iterator[FieldDescription]:
    """Yield the fields of a dataclass in order; in place of a section, yield the section's fields."""
    hints, texts = get_type_hints(owner), field_texts(owner)
    for field in dataclasses.fields(owner):
        name, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from describe_fields(hint, f"{name}.")
            continue
        default = None
        if not _is_required(field):
            value = field.default_factory() if callable(field.default_factory) else field.default
            default = value if isinstance(value, str) else json.dumps(value).replace("e-0", "e-")  # 1e-5, not 1e-05
        yield FieldDescription(name, _type_name(hint), default, texts[field.name])


@functools.cache
def field_texts(owner: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and of its base classes, each on one line."""
    texts: dict[str, str] = {}
    for base in owner.__bases__:
        if dataclasses.is_dataclass(base):
            texts |= field_texts(base)
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(tree, ast.ClassDef)
    return texts | {
        field.target.id: " ".join(below.value.value.split())
        for field, below in zip(tree.body, tree.body[1:], strict=False)  # each statement and the one below
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }
