"""Command lines from dataclasses: the record of a verb, and its options, which are the fields of a dataclass.

A verb's options are a frozen, keyword-only dataclass, the very object that its function takes. Each field is an option
of its name, its type and its default; the docstring below the field is the option's help:

    batch_size: int = 16
    \"\"\"Texts that are decoded together, which changes none\"\"\"

is `--batch-size BATCH_SIZE`. A field without a default must be given; a `bool` is a switch (`--no-NAME` where it is
True by default); a `Literal` has choices; a tuple takes several words. `option` and the functions below it state what
a type cannot.
"""

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from megatron_fanformer.configuration import field_texts
from megatron_fanformer.durable_files import at_home
from megatron_fanformer.errors import InputError

Options = TypeVar("Options")
Source = Literal["option", "argument", "overrides", "command_line", "caller"]
"""Origin of a field's value."""

PROGRAM = "megatron-fanformer"
ANY_FIELD = (
    "Any field of the configuration can be set as --section.field VALUE, e.g. --training.train_iters 100. "
    f"`{PROGRAM} config` lists every field."
)
"""Help notes of a verb that takes a whole configuration."""

_COUNT = re.compile(r"(\d[\d_]*(?:\.\d+)?)([KMGBT]?)", re.ASCII | re.IGNORECASE)
_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}
_MOST_COUNTED = 10**18

_SHAPE = "option"  # the key of a field's metadata


@dataclass(frozen=True, kw_only=True)
class Verb(Generic[Options]):
    """One verb of the command line."""

    name: str
    help: str
    """One sentence for --help."""
    options: type[Options]
    """The dataclass of its options."""
    run: Callable[[Options], None]
    """The function that runs it; slow imports belong inside."""
    examples: tuple[str, str]
    """Commands at the end of its --help, without the program's name; a line end becomes one in the shell."""
    notes: str = ""
    """Text of its --help below the options."""
    results_are_files: bool = False
    """Whether it continues when nobody reads its output."""
    takes_signals: bool = False
    """Whether it handles signals itself until its end."""
    advice: Callable[[Sequence[str]], list[str]] = field(default=lambda _command_line: [])
    """Returns further lines for a command line that the parser refuses."""

    @property
    def takes_overrides(self) -> bool:
        """Return whether fields of a configuration can be set, as --section.field VALUE."""
        return any(_shape(entry).source == "overrides" for entry in _fields(self.options))

    def read(self, given: Mapping[str, Any], overrides: Sequence[str], command_line: Sequence[str]) -> Options:
        """Return the options, with their defaults where the parser found nothing.

        Raises:
            InputError: a rule of theirs is broken.
        """
        values: dict[str, Any] = {}
        for entry in _fields(self.options):
            source = _shape(entry).source
            if source == "overrides":
                values[entry.name] = tuple(overrides)
            elif source == "command_line":
                values[entry.name] = tuple(command_line)
            elif source != "caller" and entry.name in given:
                value = given[entry.name]
                values[entry.name] = tuple(value) if isinstance(value, list) else value
        return self.options(**values)


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """Properties of an option that its field's name, type and default do not state."""

    source: Source = "option"
    name: str | None = None
    """The option's name with its dashes; None: as its field."""
    metavar: str | tuple[str, ...] | None = None
    """The value's placeholder in --help; None: from the option's name."""
    parse: Callable[[str], Any] | None = None
    """Parses one word, in place of the type."""
    repeated: bool = False
    """Whether the option may be repeated, each time adding one word to a tuple."""
    nargs: int | str | None = None
    """Number of words of a tuple; None: one or more."""
    group: str | None = None
    """Title of its group in --help."""
    exclusive: str | None = None
    """Name of a group of options of which at most one may be given."""


def option(default: Any = dataclasses.MISSING, **shape: Any) -> Any:
    """Return the field of an option, of the given `_Shape`."""
    return field(default=default, metadata={_SHAPE: _Shape(**shape)})


def argument(default: Any = dataclasses.MISSING, **shape: Any) -> Any:
    """Return the field of an argument that is known by its place."""
    return option(default, source="argument", **shape)


def overrides() -> Any:
    """Return the field of the remaining arguments: fields of a configuration, as --section.field VALUE."""
    return option((), source="overrides")


def command_line() -> Any:
    """Return the field of the whole line, for the ranks of a run that are started with it."""
    return option((), source="command_line")


def not_an_option(default: Any) -> Any:
    """Return a field that callers in Python alone may set."""
    return option(default, source="caller")


def home_path(text: str) -> Path:
    """Read a path, in which `~/` is the home directory."""
    return Path(at_home(text))


def path_or_none(text: str) -> Path | None:
    """Read a path; an empty word, such as a script's unset variable, is as if the option were left out."""
    return home_path(text) if text else None


def count_of(text: str) -> int:
    """Return a number of tokens, bytes or steps: digits, which may have a factor, as in 3.9T, 300B, 10G, 15M or 20K.

    Raises:
        InputError: it is none, has a fraction, or is not from 1 to 10^18.
    """
    match = _COUNT.fullmatch(text)
    number = Decimal(match[1]) * _FACTORS[match[2].upper()] if match else Decimal(0)
    if not 1 <= number <= _MOST_COUNTED or number != number.to_integral_value():
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


def add_options(parser: argparse.ArgumentParser, owner: type) -> None:
    """Add an argument for each field; the namespace will hold only those on the command line."""
    hints, texts = get_type_hints(owner), field_texts(owner)
    groups: dict[str | None, Any] = {None: parser}
    for entry in dataclasses.fields(owner):
        shape = _shape(entry)
        if shape.source not in ("option", "argument"):
            continue
        key = shape.exclusive or shape.group
        if key not in groups:
            is_exclusive = shape.exclusive is not None
            groups[key] = parser.add_mutually_exclusive_group() if is_exclusive else parser.add_argument_group(key)
        keywords = _keywords(entry, hints[entry.name], shape)
        keywords["help"] = _help(texts[entry.name], entry).replace("%", "%%")
        if shape.source == "argument":
            groups[key].add_argument(entry.name, default=argparse.SUPPRESS, **keywords)
            continue
        name = shape.name or option_name(f"no_{entry.name}" if entry.default is True else entry.name)
        if keywords.get("action") not in ("store_true", "store_false") and "choices" not in keywords:
            keywords["metavar"] = shape.metavar or name.lstrip("-").replace("-", "_").upper()
        is_required = entry.default is entry.default_factory is dataclasses.MISSING
        groups[key].add_argument(name, dest=entry.name, default=argparse.SUPPRESS, required=is_required, **keywords)


def _keywords(entry: "dataclasses.Field[Any]", hint: Any, shape: _Shape) -> dict[str, Any]:
    is_optional = get_origin(hint) in (Union, UnionType)
    kind = next(kind for kind in get_args(hint) if kind is not NoneType) if is_optional else hint
    if kind is bool:
        return {"action": "store_false" if entry.default is True else "store_true"}
    keywords: dict[str, Any] = {} if shape.metavar is None else {"metavar": shape.metavar}
    has_default = entry.default is not dataclasses.MISSING
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
        if shape.repeated:
            keywords["action"] = "append"
        else:
            keywords["nargs"] = shape.nargs or ("*" if shape.source == "argument" and has_default else "+")
    elif shape.source == "argument" and has_default:
        keywords["nargs"] = "?"
    if shape.parse is not None:
        return {**keywords, "type": shape.parse}
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


def _shape(entry: "dataclasses.Field[Any]") -> _Shape:
    shape: _Shape = entry.metadata.get(_SHAPE, _Shape())
    return shape
