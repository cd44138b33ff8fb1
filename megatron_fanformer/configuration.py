"""Configurations as plain values: checked against dataclasses, overridden field by field, described.

A configuration is a frozen, keyword-only dataclass whose fields are values or such dataclasses again (its sections).
msgspec decides whether a value fits a field's type, strictly: "1" is not an integer, true is not a number. This module
adds finite numbers, the wording of errors, all of them at once, and the docstring below each field, which is read from
the source.
"""

import ast
import copy
import dataclasses
import functools
import inspect
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from megatron_fanformer.durable_files import at_home, regular_file
from megatron_fanformer.errors import InputError, did_you_mean

Config = TypeVar("Config")

TYPES: dict[Any, tuple[str, str]] = {
    int: ("an integer", "integers"),
    float: ("a finite number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("text", "text"),
    NoneType: ("null", "null"),
    Any: ("a value", "values"),
}
"""The name of each type, and of many of it."""
MOST_SHOWN = 80  # characters of a wrong value

Advice = Callable[[str], str | None]
"""Returns the remedy, as a clause, for a name that is no field's; None: nothing special. It gets a key as its dotted
name, an argument of the command line as it is."""


def no_advice(_name: str) -> None:
    """Advice where there is none."""


# -- from plain values


def build(values: Mapping[str, Any], owner: type[Config], prefix: str = "", *, advice: Advice = no_advice) -> Config:
    """Return the dataclass that nested plain values describe.

    Args:
        prefix: precedes the names in messages, such as `model.`.
        advice: returns the remedy for an unknown key; without one the key most like it is named.

    Raises:
        InputError: keys are unknown or missing, or values have a wrong type; one line each, with the dotted name.
    """
    if problems := value_problems(values, owner, prefix, advice=advice):
        raise InputError("\n".join(problems))
    return _instance(values, owner)


def value_problems(
    values: Mapping[str, Any], owner: type, prefix: str = "", *, advice: Advice = no_advice
) -> list[str]:
    """Return one line for each unknown key, each missing one, and each value of a wrong type."""
    hints = get_type_hints(owner)
    problems = []
    for key in values:
        if key not in hints:
            remedy = did_you_mean(str(key), hints, f"the keys here are {', '.join(hints)}", prefix=prefix)
            problems.append(f"unknown configuration key {prefix}{key}; {advice(f'{prefix}{key}') or remedy}")
    for field in dataclasses.fields(owner):
        name, hint = prefix + field.name, hints[field.name]
        present, value = field.name in values, values.get(field.name)
        if _is_required(field) and not present and not _is_section(hint):
            problems.append(f"{name} is missing; it must be {_type_name(hint)}")
        elif _is_section(hint) and (isinstance(value, Mapping) or (_is_required(field) and not present)):
            problems += value_problems(value or {}, hint, f"{name}.", advice=advice)
        elif present and (_is_section(hint) or not _fits(value, hint)):
            text = json.dumps(value, ensure_ascii=False, default=str)
            shown = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
            problems.append(f"{name} is {shown}; it must be {_type_name(hint)}")
    return problems


def _instance(values: Mapping[str, Any], owner: type[Config]) -> Config:
    hints = get_type_hints(owner)
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(owner):  # type: ignore[arg-type]
        name, hint = field.name, hints[field.name]
        if _is_section(hint) and (name in values or _is_required(field)):
            fields[name] = _instance(values.get(name, {}), hint)
        elif name in values:
            fields[name] = msgspec.convert(at_home(values[name]), hint)
    return owner(**fields)


def _fits(value: Any, hint: Any) -> bool:
    try:
        converted = msgspec.convert(value, hint)  # to the field's type: an integer to a float, say
    except msgspec.ValidationError:
        return False
    return not isinstance(converted, float) or math.isfinite(converted)


def _is_section(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _type_name(hint: Any, *, many: bool = False) -> str:
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Literal:
        return ("" if many else "one of ") + ", ".join(map(str, parts))
    if kind in (Union, UnionType):
        return " or ".join(_type_name(part, many=many) for part in parts)
    if kind in (list, tuple):
        return f"{'lists' if many else 'a list'} of {_type_name(parts[0], many=True)}"
    if kind is dict:
        return f"{'mappings' if many else 'a mapping'} of names to {_type_name(parts[1], many=True)}"
    return f"a section with keys such as {dataclasses.fields(hint)[0].name}" if _is_section(hint) else TYPES[hint][many]


# -- files and overrides

MOST_BYTES = 1 << 20  # of a file that came with a checkpoint


class _Loader(yaml.SafeLoader):
    """YAML's plain values, with 4e-4 as a number, as in YAML 1.2; YAML 1.1 reads it as text.

    Refuses a mapping with the same key twice, of which PyYAML takes the last.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if not key.tag.endswith(":merge")]
        if twice := [key for number, key in enumerate(keys) if key in keys[:number]]:
            raise ValueError(f"{twice[0]} stands twice in one mapping{node.start_mark}")
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+|\d*\.\d+|\d+\.)[eE][-+]?\d+$"), list("-+.0123456789")
)


def yaml_value(text: str) -> Any:
    """Return the plain value of a YAML text.

    Raises:
        ValueError: it is not valid; says why, on one line.
    """
    try:
        return yaml.load(text, _Loader)
    # PyYAML raises the last two for a value that its tag does not describe, such as !!bool 7.
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def read_plain_values(file: Path) -> Any:
    """Return the plain values in a YAML file, or in a JSON file by its name, whoever wrote it.

    Raises:
        OSError: it cannot be read, is not a file, or is too large.
        ValueError: it is not valid.
    """
    text = regular_file(file, most_bytes=MOST_BYTES).read_text(encoding="utf-8")
    if file.suffix != ".json":
        return yaml_value(text)
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def read_values(file: Path) -> dict[str, Any]:
    """Return the plain values of a user's YAML file.

    Raises:
        InputError: it cannot be read, or holds no sections.
    """
    try:
        values = yaml_value(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); name a configuration file") from None
    except ValueError as error:
        raise InputError(f"{file} is not valid YAML ({error}); fix it") from None
    if not isinstance(values, dict):
        raise InputError(f"{file} holds no configuration; it must have sections such as model and training")
    return values


def read_overrides(arguments: Sequence[str], *, advice: Advice = no_advice) -> dict[str, Any]:
    """Return the values that `--section.field VALUE` and `--section.field=VALUE` set, by dotted names; the last counts.

    Args:
        advice: returns the remedy for an argument that is neither.

    Raises:
        InputError: arguments are neither, a line each; a value is missing, or not valid YAML.
    """
    values: dict[str, Any] = {}
    left, wrong = list(arguments), list[str]()
    while left:
        name, has_value, text = left.pop(0).partition("=")
        if not (is_flag := name.startswith("--")) or "." not in name:
            advised = advice(name) if is_flag else None
            rule = f" (--section.field VALUE); {advised}" if advised else "; write --section.field VALUE"
            if is_flag or not wrong:  # a word is a value of such a flag
                wrong.append(f"{name!r} is not an override{rule}")
            continue
        if not has_value and not left:
            raise InputError(f"{name} has no value; write --section.field VALUE")
        text = text if has_value else left.pop(0)
        try:
            values[name[2:]] = yaml_value(text)
        except ValueError:
            raise InputError(f"{name} {text!r} is not a valid YAML value; quote it") from None
    if wrong:
        raise InputError("\n".join(wrong))
    return values


def overlaid(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values with changes, by their dotted names, laid over them; a change replaces a mapping whole."""
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


def by_dotted_names(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a configuration's plain values without sections, by names as overrides have them: `model.fan.p_ratio`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= by_dotted_names(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def moved_names(values: Mapping[str, Any], moves: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values with fields under their current names, and the earlier names that were given.

    Args:
        moves: from a field's earlier name, `section.field`, to its current one, which counts where both are given; to
            nothing if it is gone.
    """
    moved, earlier = copy.deepcopy(dict(values)), []
    for old, new in moves.items():
        *sections, field = old.split(".")
        source: Any = moved
        for section in sections:
            source = source.get(section) if isinstance(source, dict) else None
        if not isinstance(source, dict) or field not in source:
            continue
        earlier.append(old)
        value = source.pop(field)
        section, _, field = new.partition(".")
        if new and not (isinstance(moved.get(section), dict) and field in moved[section]):
            moved = overlaid(moved, {new: value})
    return moved, earlier


# -- descriptions


class FieldDescription(NamedTuple):
    """One field of a configuration, as it is documented."""

    name: str
    """The field's dotted name."""
    type: str
    default: str | None
    """The default as YAML writes it; None for a field that must be given."""
    text: str
    """Its docstring, on one line."""


def described_fields(owner: type, prefix: str = "") -> Iterator[FieldDescription]:
    """Yield every field of a dataclass that is not a section, in order; those of its sections by dotted names."""
    hints, texts = get_type_hints(owner), field_texts(owner)
    for field in dataclasses.fields(owner):
        name, hint = prefix + field.name, hints[field.name]
        if _is_section(hint):
            yield from described_fields(hint, f"{name}.")
            continue
        default = None
        if not _is_required(field):
            value = field.default_factory() if callable(field.default_factory) else field.default
            default = value if isinstance(value, str) else json.dumps(value).replace("e-0", "e-")
        yield FieldDescription(name, _type_name(hint), default, texts[field.name])


@functools.cache
def field_texts(owner: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, on one line; those of its bases, too."""
    texts: dict[str, str] = {}
    for base in owner.__bases__:
        if dataclasses.is_dataclass(base):
            texts |= field_texts(base)
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(tree, ast.ClassDef)
    return texts | {
        field.target.id: " ".join(below.value.value.split())
        for field, below in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }
