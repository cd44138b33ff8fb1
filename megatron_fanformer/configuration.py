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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import yaml

from megatron_fanformer.durable_files import at_home, regular_file
from megatron_fanformer.errors import InputError, did_you_mean

Config = TypeVar("Config")

# The name of each type in the descriptions; and in the errors, with its article and an example.
IN_WORDS: dict[Any, tuple[str, str]] = {
    int: ("integer", "an integer"),
    float: ("number", "a finite number"),
    bool: ("true or false", "true or false"),
    str: ("text", "text"),
    list: ("list", "a list of text, such as [a, b]"),
    tuple: ("list", "a list of text, such as [a, b]"),
    dict: ("mapping", "a mapping to lists of text, such as {name: [a, b]}"),
    NoneType: ("null", "null"),
}
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
            name = f"{prefix}{key!s:.{MOST_SHOWN}}"
            remedy = did_you_mean(str(key), hints, f"the keys here are {', '.join(hints)}", prefix=prefix)
            problems.append(f"unknown configuration key {name}; {advice(name) or remedy}")
    for field in dataclasses.fields(owner):
        name, hint = prefix + field.name, hints[field.name]
        present, value = field.name in values, values.get(field.name)
        if _is_section(hint):
            if isinstance(value, Mapping) or (_is_required(field) and not present):
                problems += value_problems(value or {}, hint, f"{name}.", advice=advice)
            elif present:
                key = dataclasses.fields(hint)[0].name
                problems.append(f"{name} is {_shown(value)}; it must be a section with keys such as {key}")
        elif _is_required(field) and not present:
            problems.append(f"{name} is missing; it must be {_demand(hint)}")
        elif present and not _fits(value, hint):
            problems.append(f"{name} is {_shown(value)}; it must be {_demand(hint)}")
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


def _demand(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return ", or ".join(_demand(choice) for choice in get_args(hint))
    if get_origin(hint) is list and get_origin(element := get_args(hint)[0]) is Literal:
        return "a list of " + ", ".join(map(str, get_args(element)))
    if get_origin(hint) is dict and get_args(hint)[1] is float:
        return "a mapping to numbers, such as {name: 4}"
    if get_origin(hint) in (list, tuple) and get_args(hint)[0] in (int, float):
        return "a list of numbers, such as [1, 2]"
    return IN_WORDS[get_origin(hint) or hint][1]


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "…"


# -- files and overrides

MOST_BYTES = 1 << 20  # of a file that came with a checkpoint
MOST_ALIASES = 16  # in such a file: aliases of aliases multiply, and these make a few hundred values at most


class _Loader(yaml.SafeLoader):
    """YAML's plain values, with 4e-4 as a number, as in YAML 1.2; YAML 1.1 reads it as text.

    Refuses a mapping with the same key twice, where YAML says that there is none and PyYAML takes the last.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping whose keys differ."""
        keys = Counter((key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if twice := [name for (tag, name), count in keys.items() if count > 1 and not tag.endswith(":merge")]:
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
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def read_plain_values(file: Path) -> Any:
    """Return the plain values in a YAML file, or in a JSON file by its name, whoever wrote it.

    Raises:
        OSError: it cannot be read, is not a file, or is too large.
        ValueError: it is not valid, or has many aliases.
    """
    text = regular_file(file, most_bytes=MOST_BYTES).read_text(encoding="utf-8")
    try:
        if file.suffix == ".json":
            return json.loads(text)
        if sum(isinstance(token, yaml.AliasToken) for token in yaml.scan(text)) > MOST_ALIASES:
            raise ValueError(f"it has more than {MOST_ALIASES} aliases")
        return yaml_value(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None


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
    """Return the nested values that `--section.field VALUE` and `--section.field=VALUE` set; of a field, the last.

    Args:
        advice: returns the remedy for an argument that is neither.

    Raises:
        InputError: arguments are neither, a line each; a value is missing, or not valid YAML.
    """
    values: dict[str, Any] = {}
    left, wrong = list(arguments), list[str]()
    while left:
        key = left.pop(0)
        if not (is_flag := key.startswith("--")) or "." not in key:
            advised = advice(key.partition("=")[0]) if is_flag else None
            rule = f" (--section.field VALUE); {advised}" if advised else "; write --section.field VALUE"
            if is_flag or not wrong:  # a word is a value of such a flag
                wrong.append(f"{key!r} is not an override{rule}")
            continue
        key, has_value, text = key[2:].partition("=")
        if not has_value and not left:
            raise InputError(f"--{key} has no value; write --section.field VALUE")
        _set_nested(values, key.split("."), _override(key, text if has_value else left.pop(0)))
    if wrong:
        raise InputError("\n".join(wrong))
    return values


def _override(key: str, text: str) -> Any:
    try:
        value = yaml_value(text)
    except ValueError:
        raise InputError(f"--{key} {text!r} is not a valid YAML value; quote it") from None
    for one, other in pairwise(yaml.scan(text)):
        if "#" in text[one.end_mark.index : other.start_mark.index]:
            raise InputError(f"--{key} {text!r}: a part of it is a comment to YAML; quote it")
    return value


def overlaid(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the overrides applied."""
    merged = dict(values)
    for key, value in overrides.items():
        below = merged.get(key)
        is_section = isinstance(value, _Section) and isinstance(below, Mapping)
        merged[key] = overlaid(below, value) if is_section else value  # type: ignore[arg-type]
    return merged


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested values that dotted names stand for, to be laid over others by `overlaid`; of two, the later."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        _set_nested(nested, name.split("."), copy.deepcopy(value))  # which a later name may reach into
    return nested


def by_dotted_names(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a configuration's plain values without sections, by names as overrides have them: `model.fan.p_ratio`."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= by_dotted_names(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Undo `nested`: a mapping that was given as one value stays one."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= dotted(value, f"{prefix}{name}.") if isinstance(value, _Section) else {f"{prefix}{name}": value}
    return flat


class _Section(dict[str, Any]):
    """Values that dotted names were split into; a mapping that was given as one value is a plain dict."""


def _set_nested(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        if not isinstance(values.get(name), dict):
            values[name] = _Section()
        values = values[name]
    values[path[-1]] = value


def moved_names(values: Mapping[str, Any], moves: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values with fields under their current names, and the earlier names that were given.

    Args:
        moves: from a field's earlier name, `section.field`, to its current one; to nothing if it is gone.

    Raises:
        InputError: a field is given under both names; one line each.
    """
    moved = {name: type(part)(part) if isinstance(part, dict) else part for name, part in values.items()}
    earlier, twice = [], []
    for old, new in moves.items():
        (old_section, _, old_field), (new_section, _, new_field) = old.partition("."), new.partition(".")
        source = moved.get(old_section)
        if not isinstance(source, dict) or old_field not in source:
            continue
        target = moved.get(new_section)
        if isinstance(target, dict) and new_field in target:
            twice.append(f"{old} is the earlier name of {new}, and both are given; remove {old}")
        elif target is None or isinstance(target, dict):
            earlier.append(old)
            value = source.pop(old_field)
            if new:
                _set_nested(moved, [new_section, new_field], value)
    if twice:
        raise InputError("\n".join(twice))
    return moved, earlier


# -- descriptions


@dataclass(frozen=True, kw_only=True)
class FieldDescription:
    """One field of a configuration, as it is documented."""

    name: str
    """The field's dotted name."""
    type: str
    """The type in words; choices are in backticks."""
    default: str | None
    """The default as YAML writes it; None for a field that must be given."""
    text: str
    """Its docstring, on one line."""


def described_fields(owner: type, prefix: str = "") -> Iterator[FieldDescription]:
    """Return every field of a dataclass that is not a section, in order; those of its sections by dotted names."""
    hints, texts = get_type_hints(owner), field_texts(owner)
    for field in dataclasses.fields(owner):
        name, hint = prefix + field.name, hints[field.name]
        if _is_section(hint):
            yield from described_fields(hint, f"{name}.")
        else:
            default = None if _is_required(field) else _written(_default(field))
            yield FieldDescription(name=name, type=_type_name(hint), default=default, text=texts[field.name])


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


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(_type_name(choice) for choice in get_args(hint))
    if get_origin(hint) is list:
        return f"list of {_type_name(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"mapping of {_type_name(get_args(hint)[0])} to {_type_name(get_args(hint)[1])}"
    return IN_WORDS[hint][0]


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default


def _written(value: Any) -> str:
    if isinstance(value, list | dict):
        return str(yaml.safe_dump(value, default_flow_style=True)).strip()
    return value if isinstance(value, str) else json.dumps(value).replace("e-0", "e-")


def json_schema(owner: type) -> dict[str, Any]:
    """Return the JSON schema of a configuration: types and choices are msgspec's, descriptions the docstrings.

    Keys that are not fields are not allowed; a section that has defaults may be null.
    """
    definitions = msgspec.json.schema(owner)["$defs"]
    for section in _sections(owner):
        _complete(definitions[section.__name__], section)
    whole = definitions.pop(owner.__name__)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": definitions, **whole}


def _sections(owner: Any) -> Iterator[Any]:
    yield owner
    for hint in get_type_hints(owner).values():
        if _is_section(hint):
            yield from _sections(hint)


def _complete(definition: dict[str, Any], owner: Any) -> None:
    definition["additionalProperties"] = False
    definition["description"] = " ".join((inspect.getdoc(owner) or "").split())
    hints, texts = get_type_hints(owner), field_texts(owner)
    for field in dataclasses.fields(owner):
        described = definition["properties"][field.name]
        described.pop("title", None)
        described["description"] = texts[field.name]
        if not _is_section(hints[field.name]) and not _is_required(field):
            described["default"] = _default(field)
        elif not _is_required(field):
            described["anyOf"] = [{"$ref": described.pop("$ref")}, {"type": "null"}]
