"""A verb is one record: what it needs to be a verb of the program, and that its options reach its function."""

import dataclasses
import inspect
import pkgutil
from argparse import ArgumentParser, ArgumentTypeError
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron_fanformer import cli
from megatron_fanformer.cli import main
from megatron_fanformer.errors import InputError
from megatron_fanformer.options import Verb, add_options, argument, count, option


@dataclass(frozen=True, kw_only=True)
class ToyOptions:
    """What the toy takes."""

    files: tuple[str, ...] = argument(metavar="FILE")
    """Files to play with."""
    speed: float = option(0.5, metavar="M/S")
    """How fast: 100% is the speed of sound."""
    color: Literal["red", "blue"] | None = None
    """Its color (default: a new one each time)"""
    sound: bool = True
    """Make a sound."""
    at: tuple[str, ...] = option((), name="--place", repeated=True, group="places")
    """Where; may be repeated."""
    up: bool = option(False, exclusive="direction")
    """Go up."""
    down: bool = option(False, exclusive="direction")
    """Go down."""
    output: Path | None = None
    """Where it is written."""
    format: Literal["a", "b"] | None = option(None, needs=("output", "color=red"))
    """Its format."""
    overrides: tuple[str, ...] = ()
    command_line: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.speed < 0:
            raise InputError(f"--speed is {self.speed:g}; it must be 0 or more")


CALLS: list[Any] = []


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[ToyOptions]:
    """What a verb `toy` was called with, which is one entry in the table of verbs."""
    CALLS.clear()
    examples = ("toy a --speed 2", "toy a b\n--place here --toy.size 3")
    toy = Verb(
        name="toy",
        help="Play.",
        options=ToyOptions,
        run="tests.test_options:CALLS.append",
        examples=examples,
        notes="It is fun.",
        removed={"--slow": "use --speed 0"},
    )
    monkeypatch.setitem(cli.VERBS, "toy", toy)
    return CALLS


def test_a_new_verb_runs_with_its_options(played: list[ToyOptions]) -> None:
    line = "toy a b --speed 2 --color red --format b --no-sound --place x --place y --up --output o --toy.size 3"
    assert main(line.split()) == 0
    assert main(["toy", "a", "--debug"]) == 0
    assert played == [
        ToyOptions(
            files=("a", "b"),
            speed=2.0,
            color="red",
            sound=False,
            at=("x", "y"),
            up=True,
            output=Path("o"),
            format="b",
            overrides=("--toy.size", "3"),
            command_line=tuple(line.split()),
        ),
        ToyOptions(files=("a",), command_line=("toy", "a", "--debug")),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("toy", "the following arguments are required: FILE; megatron-fanformer toy --help lists the options"),
        ("toy a --speed fast", "argument --speed: invalid float value: 'fast'"),
        ("toy a --color green", "argument --color: invalid choice: 'green'"),
        ("toy a --up --down", "argument --down: not allowed with argument --up"),
        ("toy a --speed -1", "--speed is -1; it must be 0 or more"),
        ("toy a --format a", "--format has no effect without --output or red; add that, or leave it out"),
        ("toy a --slow", "unknown argument --slow; use --speed 0"),
    ],
)
def test_wrong_options_of_a_new_verb_are_one_line(
    played: list[ToyOptions], capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    assert main(line.split(" ")) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith(f"{cli.PROGRAM}: {message}")
    assert played == []


def test_the_help_of_a_new_verb(
    played: list[ToyOptions], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["toy", "--help"])
    printed = capsys.readouterr().out
    for shown in (
        "  FILE                Files to play with\n",
        "  --speed M/S         How fast: 100% is the speed of sound (default: 0.5)\n",
        "  --color {red,blue}  Its color (default: a new one each time)\n",
        "  --no-sound          Do not make a sound\n",
        "\nplaces:\n  --place PLACE       Where; may be repeated\n",
        "[--up | --down]",
        "\nIt is fun.\n\nexamples:\n  megatron-fanformer toy a --speed 2\n"
        "  megatron-fanformer toy a b \\\n      --place here --toy.size 3\n",
    ):
        assert shown in printed
    assert "overrides" not in printed and "command" not in printed


def test_a_verb_without_overrides_has_no_unknown_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Bare:
        """Nothing."""

    bare = Verb(name="bare", help="Do nothing.", options=Bare, run="builtins:print", examples=("bare", "bare"))
    monkeypatch.setitem(cli.VERBS, "bare", bare)
    assert main(["bare"]) == 0
    assert main(["bare", "--a.b", "3"]) == 2
    assert "unknown argument --a.b; megatron-fanformer bare --help lists the options" in capsys.readouterr().err


@pytest.mark.parametrize("verb", cli.VERBS.values(), ids=lambda verb: verb.name)
def test_every_record_is_whole(verb: Verb[Any]) -> None:
    """Its options have types that a parser can be made of, and docstrings; its function exists and takes them."""
    add_options(ArgumentParser(), verb.options)
    first, *_ = inspect.signature(pkgutil.resolve_name(verb.run)).parameters.values()
    assert first.annotation is verb.options
    assert dataclasses.fields(verb.options)
    assert verb.options.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert verb.help.endswith(".") and all(example.split()[0] == verb.name for example in verb.examples)


def test_counts() -> None:
    assert [count(text) for text in ("1T", "2G", "1.5K", "9_001")] == [10**12, 2 * 10**9, 1500, 9001]
    for text in ("", "T", "0", "1.0001K", "-1", " 1", "1e9", "\u0661", "1000001T"):
        with pytest.raises(ArgumentTypeError, match="is not a number from 1 to 1000000T; write it as in 1"):
            count(text)
