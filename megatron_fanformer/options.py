"""Command lines from dataclasses: the record of a verb, and its options, which are the fields of a dataclass.

A verb's options are a frozen, keyword-only dataclass, the very object that its function takes. Each field is an option
of its name, its type and its default; the docstring below the field is the option's help:

    batch_size: int = 16
    \"\"\"Texts that are decoded together, which changes none\"\"\"

is `--batch-size BATCH_SIZE`. A field without a default must be given; a `bool` is a switch (`--no-NAME` where it is
True by default); a `Literal` has choices; a tuple takes several words. `option` states what a type cannot.
"""

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from decimal import Decimal
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megatron_fanformer.configuration import field_texts
from megatron_fanformer.durable_files import at_home
from megatron_fanformer.errors import InputError

Options = TypeVar("Options")

PROGRAM = "megatron-fanformer"
ANY_FIELD = (
    "Any field of the configuration can be set as --section.field VALUE, e.g. --training.train_iters 100. "
    f"`{PROGRAM} config` lists every field."
)
"""Help notes of a verb that takes a whole configuration."""

_COUNT = re.compile(r"(\d[\d_]*(?:\.\d+)?)([KMGBT]?)", re.ASCII | re.IGNORECASE)
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True)
class Verb(Generic[Options]):
    """One verb of the command line."""

    name: str
    help: str
    """One sentence for --help."""
    options: type[Options]
    """The dataclass of its options."""
    run: str
    """The function that runs it, as "package.module:function"; its module is imported when the verb runs."""
    examples: tuple[str, str]
    """Commands at the end of its --help, without the program's name; a line end becomes one in the shell."""
    before: Callable[[Options], tuple[Any, ...]] = field(default=lambda options: (options,))
    """Returns the arguments of `run`, and prepares this process for its module, where that imports torch."""
    notes: str = ""
    """Text of its --help below the options."""
    removed: Mapping[str, str] = field(default_factory=dict)
    """Options of earlier versions, with their dashes, and the remedy for each."""

    def remedies(self, command_line: Sequence[str]) -> list[str]:
        """Return the remedies for a command line that the parser refuses."""
        return [remedy for name, remedy in self.removed.items() if name in command_line]

    def read(self, given: Mapping[str, Any], rest: Sequence[str], command_line: Sequence[str]) -> Options:
        """Return the options, with their defaults where the parser found nothing.

        Args:
            given: the parsed values by the names of their fields.
            rest: arguments that are no options; overrides, where the verb takes them.

        Raises:
            InputError: an argument is unknown, an option has no effect, or breaks its own rule.
        """
        fields = {entry.name: entry for entry in _fields(self.options)}
        unknown = [word for word in rest if word in self.removed or "overrides" not in fields]
        if unknown:
            remedy = next(iter(self.remedies(command_line)), f"{PROGRAM} {self.name} --help lists the options")
            raise InputError(f"unknown argument {unknown[0]}; {remedy}")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in given.items() if name in fields
        }
        if rest:
            values["overrides"] = tuple(rest)
        problems = []
        for name in values:
            needs = fields[name].metadata.get("needs", ())
            if needs and not any(_is_met(need, values) for need in needs):
                shown = rest[0] if name == "overrides" else _written(fields[name])
                others = " or ".join(need.partition("=")[2] or _written(fields[need]) for need in needs)
                problems.append(f"{shown} has no effect without {others}; add that, or leave it out")
        if problems:
            raise InputError("\n".join(problems))
        if "command_line" in fields:
            values["command_line"] = tuple(command_line)
        return self.options(**values)


def _is_met(need: str, values: Mapping[str, Any]) -> bool:
    name, _, value = need.partition("=")
    return name in values and (not value or values[name] == value)


def option(default: Any = MISSING, **shape: Any) -> Any:
    """Return the field of an option.

    Args:
        shape: by these names:
            name: the option's name with its dashes; by default as its field.
            metavar: the value's placeholder in --help; by default from the option's name.
            parse: parses one word, in place of the type.
            repeated: whether the option may be repeated, each time adding one word to a tuple.
            nargs: number of words of a tuple; by default one or more.
            group: title of its group in --help.
            exclusive: name of a group of options of which at most one may be given.
            needs: fields of which one must be given for this one to have an effect, or have a value (`action=run`).
            kind: `argument`, known by its place, or `none`, which the command line cannot set.
    """
    return field(default=default, metadata=shape)


def argument(default: Any = MISSING, **shape: Any) -> Any:
    """Return the field of an argument that is known by its place."""
    return option(default, kind="argument", **shape)


def overrides(*, needs: tuple[str, ...] = ()) -> Any:
    """Return the field `overrides`: the remaining arguments, fields of a configuration as --section.field VALUE."""
    return option((), kind="none", needs=needs)


def command_line() -> Any:
    """Return the field `command_line`: the whole line, for the ranks of a run that are started with it."""
    return option((), kind="none")


def home_path(text: str) -> Path:
    """Read a path, in which `~/` is the home directory."""
    return Path(at_home(text))


def count_of(text: str) -> int:
    """Return a number of tokens, bytes or steps: digits, which may have a factor, as in 3.9T, 300B, 10G, 15M or 20K.

    Raises:
        InputError: it is none, has a fraction, or is not from 1 to 10^18.
    """
    match = _COUNT.fullmatch(text)
    number = Decimal(match[1]) * _FACTORS[match[2].upper()] if match else Decimal(0)
    if not 1 <= number <= 10**18 or number != number.to_integral_value():
        raise InputError(f"{text!r} is not a number from 1 to 1000000T; write it as in 1.05T, 300B, 10G, 15M or 20K")
    return int(number)


def count(text: str) -> int:
    """Read an option as `count_of` does."""
    try:
        return count_of(text)
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def option_name(name: str) -> str:
    """Return how the option of a field is written, where it has no other name."""
    return f"--{name.replace('_', '-')}"


def _written(entry: "dataclasses.Field[Any]") -> str:
    if entry.metadata.get("kind") == "argument":
        return str(entry.metadata.get("metavar", entry.name.upper()))
    return entry.metadata.get("name") or option_name(f"no_{entry.name}" if entry.default is True else entry.name)


def add_options(parser: argparse.ArgumentParser, owner: type) -> None:
    """Add an argument for each field; the namespace will hold only those on the command line."""
    hints, texts = get_type_hints(owner), field_texts(owner)
    groups: dict[str | None, Any] = {None: parser}
    for entry in _fields(owner):
        shape = entry.metadata
        if shape.get("kind") == "none":
            continue
        key = shape.get("exclusive") or shape.get("group")
        if key not in groups:
            is_exclusive = shape.get("exclusive") is not None
            groups[key] = parser.add_mutually_exclusive_group() if is_exclusive else parser.add_argument_group(key)
        keywords = _keywords(entry, hints[entry.name])
        keywords["help"] = _help(texts[entry.name], entry).replace("%", "%%")
        if shape.get("kind") == "argument":
            groups[key].add_argument(entry.name, default=argparse.SUPPRESS, **keywords)
            continue
        name = _written(entry)
        if keywords.get("action") not in ("store_true", "store_false") and "choices" not in keywords:
            keywords.setdefault("metavar", name.lstrip("-").replace("-", "_").upper())
        is_required = entry.default is entry.default_factory is MISSING
        groups[key].add_argument(name, dest=entry.name, default=argparse.SUPPRESS, required=is_required, **keywords)


def _keywords(entry: "dataclasses.Field[Any]", hint: Any) -> dict[str, Any]:
    """Return the keywords of `add_argument` that follow from a field's type and shape."""
    shape = entry.metadata
    is_optional = get_origin(hint) in (Union, UnionType)
    kind = next(kind for kind in get_args(hint) if kind is not NoneType) if is_optional else hint
    if kind is bool:
        return {"action": "store_false" if entry.default is True else "store_true"}
    keywords: dict[str, Any] = {"metavar": shape["metavar"]} if shape.get("metavar") else {}
    is_optional_argument = shape.get("kind") == "argument" and entry.default is not MISSING
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
        if shape.get("repeated"):
            keywords["action"] = "append"
        else:
            keywords["nargs"] = shape.get("nargs") or ("*" if is_optional_argument else "+")
    elif is_optional_argument:
        keywords["nargs"] = "?"
    if shape.get("parse") is not None:
        return {**keywords, "type": shape["parse"]}
    if get_origin(kind) is Literal:
        return {**keywords, "choices": get_args(kind)}
    assert kind in (str, int, float, Path), f"{entry.name}: nothing reads a word as {kind}; give it parse"
    return {**keywords, "type": home_path if kind is Path else kind}


def _help(text: str, entry: "dataclasses.Field[Any]") -> str:
    """Return the docstring, with the default where that is a value to read."""
    text = text.removesuffix(".")
    if entry.default is True:
        return f"Do not {text[0].lower()}{text[1:]}"
    if entry.default in (dataclasses.MISSING, None, (), "") or isinstance(entry.default, bool):
        return text
    default = f"{entry.default:g}" if isinstance(entry.default, float) else entry.default
    return f"{text} (default: {default})"


def _fields(owner: Any) -> "tuple[dataclasses.Field[Any], ...]":
    return dataclasses.fields(owner)
