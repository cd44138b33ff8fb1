"""Builds command lines from dataclasses: a `Verb`, and the dataclass of the verb's options.

The options of a verb are a frozen, keyword-only dataclass, which the verb's function takes as its argument. Each field
is an option with the field's name, type and default; the docstring below the field is the option's help:

    batch_size: int = 16
    \"\"\"Number of texts that are decoded together\"\"\"

makes `--batch-size BATCH_SIZE`. An option without a default is required; a `bool` is a switch, `--no-NAME` if it is
True by default; a `Literal` has choices; a tuple takes several words. `option` states what a type cannot.

Two fields are no options: `overrides` gets the remaining arguments, fields of a configuration as --section.field VALUE,
and `command_line` the whole line, with which the ranks of a run are started.
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

from megatron_fanformer.configuration import expand_home, field_texts
from megatron_fanformer.errors import InputError

Options = TypeVar("Options")

PROGRAM = "megatron-fanformer"
ANY_FIELD = (
    "Any field of the configuration can be set as --section.field VALUE, e.g. --training.train_iters 100. "
    f"`{PROGRAM} config` lists every field."
)
"""`Verb.notes` of a verb that takes any field of the configuration."""

_COUNT = re.compile(r"(\d[\d_]*(?:\.\d+)?)([KMGBT]?)", re.ASCII | re.IGNORECASE)
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True)
class Verb(Generic[Options]):
    """A verb of the command line."""

    name: str
    help: str
    """One sentence for --help."""
    options: type[Options]
    """The dataclass of the verb's options."""
    run: str
    """The verb's function, as "package.module:function"; the module is imported when the verb runs."""
    examples: tuple[str, str]
    """Commands at the end of --help, without the program's name; a line end is shown as a continued line."""
    before: Callable[[Options], tuple[Any, ...]] = field(default=lambda options: (options,))
    """Prepares this process before the module of `run` is imported, and returns the arguments of `run`."""
    notes: str = ""
    """Text of --help below the options."""
    removed: Mapping[str, str] = field(default_factory=dict)
    """Remedies by options of earlier versions, which are written with their dashes."""

    def remedies(self, command_line: Sequence[str]) -> list[str]:
        """Return the remedies for the options of earlier versions on a command line."""
        return [remedy for name, remedy in self.removed.items() if name in command_line]

    def read(self, parsed: Mapping[str, Any], rest: Sequence[str], command_line: Sequence[str]) -> Options:
        """Return the options of a command line.

        Args:
            parsed: the parsed values by field name, only for fields that the command line states.
            rest: the arguments that the parser does not know: overrides, if the verb takes them.

        Raises InputError if an argument is unknown, an option has no effect, or a value breaks the option's rule.
        """
        fields = {entry.name: entry for entry in dataclasses.fields(self.options)}  # type: ignore[arg-type]
        if unknown := [word for word in rest if word in self.removed or "overrides" not in fields]:
            remedy = next(iter(self.remedies(command_line)), f"{PROGRAM} {self.name} --help lists the options")
            raise InputError(f"unknown argument {unknown[0]}; {remedy}")
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in parsed.items() if name in fields
        }
        if rest:
            values["overrides"] = tuple(rest)
        problems = []
        for name in values:
            needs = fields[name].metadata.get("needs", ())
            if needs and not any(_is_met(need, values) for need in needs):
                shown = rest[0] if name == "overrides" else _shown_name(fields[name])  # the first override, for all
                # FIELD=VALUE is shown as VALUE: the field is an argument, such as the action of `sweep`.
                needed = " or ".join(need.partition("=")[2] or _shown_name(fields[need]) for need in needs)
                problems.append(f"{shown} has no effect without {needed}; add that, or leave it out")
        if problems:
            raise InputError("\n".join(problems))
        if "command_line" in fields:
            values["command_line"] = tuple(command_line)
        return self.options(**values)


def _is_met(need: str, values: Mapping[str, Any]) -> bool:
    """Return whether the command line states the field `need`, or for `FIELD=VALUE` this value of the field."""
    name, _, value = need.partition("=")
    return name in values and (not value or values[name] == value)


def option(default: Any = MISSING, **shape: Any) -> Any:
    """Return the field of an option.

    Args:
        shape: by these names:
            name: the option's name with its dashes; by default as its field.
            metavar: the value's placeholder in --help; by default from the option's name.
            parse: converts a word to a value, in place of the type.
            repeated: whether the option may be repeated, each time adding one word to a tuple.
            nargs: number of words of a tuple; by default one or more.
            group: title of the option's group in --help.
            exclusive: name of a group of options of which at most one may be given.
            needs: names of fields; unless one is stated, this option has no effect. `FIELD=VALUE` demands that value.
            is_argument: whether the value is a positional argument.
    """
    return field(default=default, metadata=shape)


def argument(default: Any = MISSING, **shape: Any) -> Any:
    """Return the field of a positional argument."""
    return option(default, is_argument=True, **shape)


def count(text: str) -> int:
    """Read a number of tokens, bytes or steps, with or without a factor: 3.9T, 300B, 10G, 15M, 20K, 9001.

    Raises ArgumentTypeError if the text is no number, or not an integer from 1 to 10^18.
    """
    match = _COUNT.fullmatch(text)
    number = Decimal(match[1]) * _FACTORS[match[2].upper()] if match else Decimal(0)
    if not 1 <= number <= 10**18 or number != number.to_integral_value():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number from 1 to 1000000T; write it as in 1.05T, 300B, 10G, 15M or 20K"
        )
    return int(number)


def option_name(name: str) -> str:
    """Return the default name of a field's option, such as --batch-size."""
    return f"--{name.replace('_', '-')}"


def _shown_name(entry: "dataclasses.Field[Any]") -> str:
    """Return the name of an option or argument on the command line: --no-NAME for a switch that is on by default."""
    if entry.metadata.get("is_argument"):
        return str(entry.metadata.get("metavar", entry.name.upper()))
    return entry.metadata.get("name") or option_name(f"no_{entry.name}" if entry.default is True else entry.name)


def add_options(parser: argparse.ArgumentParser, owner: type) -> None:
    """Add the options and arguments of a dataclass; parsing returns only those that the command line states."""
    hints, texts = get_type_hints(owner), field_texts(owner)
    groups: dict[str | None, Any] = {None: parser}
    for entry in dataclasses.fields(owner):
        if entry.name in ("overrides", "command_line"):
            continue
        shape = entry.metadata
        key = shape.get("exclusive") or shape.get("group")
        if key not in groups:
            is_exclusive = shape.get("exclusive") is not None
            groups[key] = parser.add_mutually_exclusive_group() if is_exclusive else parser.add_argument_group(key)
        keywords = _keywords(entry, hints[entry.name])
        keywords["help"] = _help(texts[entry.name], entry).replace("%", "%%")
        if shape.get("is_argument"):
            groups[key].add_argument(entry.name, default=argparse.SUPPRESS, **keywords)
            continue
        name = _shown_name(entry)
        if keywords.get("action") not in ("store_true", "store_false") and "choices" not in keywords:
            keywords.setdefault("metavar", name.lstrip("-").replace("-", "_").upper())
        is_required = entry.default is entry.default_factory is MISSING
        groups[key].add_argument(name, dest=entry.name, default=argparse.SUPPRESS, required=is_required, **keywords)


def _keywords(entry: "dataclasses.Field[Any]", hint: Any) -> dict[str, Any]:
    """Return the keywords for `add_argument` that follow from a field's type and from the shape given to `option`."""
    shape, kind = entry.metadata, hint
    if get_origin(hint) in (Union, UnionType):  # X | None: a word is read as X
        kind = next(part for part in get_args(hint) if part is not NoneType)
    if kind is bool:
        return {"action": "store_false" if entry.default is True else "store_true"}
    keywords: dict[str, Any] = {"metavar": shape["metavar"]} if shape.get("metavar") else {}
    is_optional_argument = shape.get("is_argument") and entry.default is not MISSING
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
    return {**keywords, "type": (lambda text: Path(expand_home(text))) if kind is Path else kind}


def _help(text: str, entry: "dataclasses.Field[Any]") -> str:
    """Return a field's docstring as help, with the default if there is one to show."""
    text = text.removesuffix(".")
    if entry.default is True:  # the option is --no-NAME
        return f"Do not {text[0].lower()}{text[1:]}"
    if entry.default in (MISSING, None, (), "") or isinstance(entry.default, bool):
        return text
    default = f"{entry.default:g}" if isinstance(entry.default, float) else entry.default
    return f"{text} (default: {default})"
