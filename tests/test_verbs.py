"""A verb is one record: what it needs to be a verb of the program, and that its options reach its function."""

import dataclasses
import inspect
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import pytest

from megatron_fanformer import cli
from megatron_fanformer.cli import main
from megatron_fanformer.configuration import field_texts
from megatron_fanformer.errors import InputError
from megatron_fanformer.experiments.probes.settings import PROBES
from megatron_fanformer.formats.verb import Averaged, ConvertOptions, MergeOptions
from megatron_fanformer.generation.config import GenerateConfig
from megatron_fanformer.options import (
    Verb,
    add_options,
    argument,
    command_line,
    count_of,
    not_an_option,
    option,
    overrides,
)
from megatron_fanformer.parity.verb import ParityConfig
from megatron_fanformer.preparation.prepare import PrepareConfig


def passed_on(function: str, *arguments: str) -> Any:
    """The call of a function of the package that a command line makes."""
    done = SimpleNamespace(lines=lambda *_: [], findings=[])
    with mock.patch(f"megatron_fanformer.{function}", return_value=done) as called:
        assert main(arguments) == 0
    (call,) = called.call_args_list
    return call


def prepared(options: str) -> PrepareConfig:
    return passed_on("preparation.prepare.prepare", "prepare", *options.split()).args[0]


def test_options_of_prepare() -> None:
    documents = (
        "a b --output o --tokenizer t --workers 3 --text-field body --eod-id 7 --format npy --part-size 2K "
        "--min-length 4 --max-length 9 --source x --source y --no-ledger --backend tokenizers --strict"
    )
    assert prepared(documents) == PrepareConfig(
        inputs=("a", "b"),
        output="o",
        tokenizer="t",
        workers=3,
        text_field="body",
        eod_id=7,
        format="npy",
        part_bytes=2000,
        min_length=4,
        max_length=9,
        sources=("x", "y"),
        ledger=False,
        backend="tokenizers",
        strict=True,
    )
    npy = prepared("a --output o --tokenizer t --from-npy --npy-dtype uint32")
    assert (npy.from_npy, npy.npy_dtype) == (True, "uint32")
    chats = "a --output o --tokenizer t --chat --chat-template f --learn last --max-tokens 5 --too-long drop"
    assert prepared(chats) == PrepareConfig(
        inputs=("a",),
        output="o",
        tokenizer="t",
        chat=True,
        chat_template="f",
        learn="last",
        max_tokens=5,
        too_long="drop",
    )
    assert prepared("a --output o --tokenizer t") == PrepareConfig(inputs=("a",), output="o", tokenizer="t")


@pytest.mark.parametrize(
    ("size", "part_bytes"), [("7", 7), ("7K", 7_000), ("7M", 7_000_000), ("7g", 7 * 10**9), ("7T", 7 * 10**12)]
)
def test_a_size_is_in_powers_of_a_thousand(size: str, part_bytes: int) -> None:
    assert prepared(f"a --output o --tokenizer t --part-size {size}").part_bytes == part_bytes


@pytest.fixture
def recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_fanformer.formats.recognition.recognise", lambda *_: None)


@pytest.mark.usefixtures("recognised")
def test_options_of_convert() -> None:
    options = (
        "convert from there --to hf --config c --tokenizer t --eod-id 3 --dtype bf16 --padded-vocab-size 64 "
        "--max-shard-size 1MB --no-verify --report r.json"
    )
    expected = ConvertOptions(
        source="from",
        to="hf",
        destination=Path("there"),
        config=Path("c"),
        tokenizer=Path("t"),
        eod_id=3,
        dtype="bf16",
        padded_vocab_size=64,
        max_shard_size="1MB",
        verified=False,
        receipt=Path("r.json"),
    )
    assert passed_on("formats.convert.convert_checkpoint", *options.split()) == mock.call(expected)


def test_options_of_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_fanformer.formats.recognition.find_checkpoint", Path)
    with mock.patch("megatron_fanformer.formats.merge.merge_checkpoints", return_value=[]) as called:
        assert main(["merge", "a", "b", "--output", "o", "--weights", "1", "3", "--dtype", "bf16"]) == 0
    averaged = [Averaged(Path(name), str(Path(name).absolute())) for name in ("a", "b")]
    assert called.call_args == mock.call(averaged, [0.25, 0.75], Path("o"), "bf16")
    assert MergeOptions(sources=("a", "b"), output=Path("o")).shares(2) == [0.5, 0.5]
    assert MergeOptions(sources=("a", "b"), output=Path("o"), weights=(1e308, 1e308)).shares(2) == [0.5, 0.5]


@pytest.mark.usefixtures("recognised")
def test_options_of_generate() -> None:
    options = (
        "generate run --prompt a --prompt b --num-samples 2 --max-new-tokens 5 --stop x --stop y --temperature 0.5 "
        "--top-k 3 --top-p 0.25 --seed 4 --batch-size 6 --tokenizer t --json"
    )
    call = passed_on("generation.generate.print_generations", *options.split())
    assert call.args[0] == GenerateConfig(
        checkpoint="run",
        prompts=("a", "b"),
        num_samples=2,
        max_new_tokens=5,
        stop=("x", "y"),
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        seed=4,
        batch_size=6,
        tokenizer="t",
        json=True,
    )


def test_options_of_parity() -> None:
    options = (
        "parity --config c.yaml --layouts tp=2 pp=2 --report r --steps 3 --dtype bf16 --communication --device cpu "
        "--transformer-impl local --model.num_layers 2"
    )
    assert passed_on("parity.command.parity", *options.split()).args[0] == ParityConfig(
        file=Path("c.yaml"),
        overrides=("--model.num_layers", "2"),
        report=Path("r"),
        layouts=("tp=2", "pp=2"),
        steps=3,
        dtype="bf16",
        communication=True,
        device="cpu",
        transformer_impl="local",
    )


def test_the_word_compare_compares_runs() -> None:
    call = passed_on("experiments.report.dynamics.compare_runs", "report", "compare", "a", "b", "--output", "c")
    assert call == mock.call([Path("a"), Path("b")], Path("c"))


# -- a new verb


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
    owner: str = not_an_option("nobody")
    output: Path | None = None
    """Where it is written."""
    overrides: tuple[str, ...] = overrides()
    command_line: tuple[str, ...] = command_line()

    def __post_init__(self) -> None:
        if self.speed < 0:
            raise InputError(f"--speed is {self.speed:g}; it must be 0 or more")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[ToyOptions]:
    """What a verb `toy` was called with, which is one entry in the table of verbs."""
    calls: list[ToyOptions] = []
    examples = ("toy a --speed 2", "toy a b\n--place here --toy.size 3")
    toy = Verb(name="toy", help="Play.", options=ToyOptions, run=calls.append, examples=examples, notes="It is fun.")
    monkeypatch.setitem(cli.VERBS, "toy", toy)
    return calls


def test_a_new_verb_runs_with_its_options(played: list[ToyOptions]) -> None:
    line = "toy a b --speed 2 --color red --no-sound --place x --place y --up --output o --toy.size 3"
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
    for line in (["--help"], ["toy", "--help"]):
        with pytest.raises(SystemExit) as end:
            main(line)
        assert end.value.code == 0
    every, own = capsys.readouterr().out.split("usage: megatron-fanformer toy")
    assert "\n    toy                 Play.\n" in every
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
        assert shown in own
    assert "owner" not in own and "overrides" not in own and "command" not in own


def test_a_verb_without_overrides_has_no_unknown_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Bare:
        """Nothing."""

    bare = Verb(name="bare", help="Do nothing.", options=Bare, run=print, examples=("bare", "bare"))
    monkeypatch.setitem(cli.VERBS, "bare", bare)
    assert main(["bare"]) == 0
    assert main(["bare", "--a.b", "3"]) == 2
    assert "unknown argument --a.b; megatron-fanformer bare --help lists the options" in capsys.readouterr().err


@pytest.mark.parametrize("verb", cli.VERBS.values(), ids=lambda verb: verb.name)
def test_every_record_is_whole(verb: Verb[Any]) -> None:
    """Its options have types that a parser can be made of, and docstrings; it is called with nothing else."""
    add_options(ArgumentParser(), verb.options)
    (parameter,) = inspect.signature(verb.run).parameters.values()
    assert parameter.annotation is verb.options
    assert dataclasses.fields(verb.options)
    assert verb.options.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert verb.help.endswith(".") and all(example.split()[0] == verb.name for example in verb.examples)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1T", 10**12),
        ("1.05t", 1_050_000_000_000),
        ("300B", 3 * 10**11),
        ("10g", 10**10),
        ("1.5K", 1500),
        ("9_001", 9001),
    ],
)
def test_counts(text: str, number: int) -> None:
    assert count_of(text) == number


@pytest.mark.parametrize("text", ["", "T", "0", "1.0001K", "-1", " 1", "1e9", "inf", "\u0661", "1KK", "1000001T"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is not a number from 1 to 1000000T; write it as in 1"):
        count_of(text)


def test_help_imports_nothing_that_is_slow() -> None:
    program = (
        "import sys; from megatron_fanformer.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: print(sorted({'torch', 'numpy', 'transformers', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "train", "--help"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_help_of_experiment_names_every_one() -> None:
    text = field_texts(cli.VERBS["experiment"].options)["name"]
    assert [name for name in PROBES if name not in text] == []
