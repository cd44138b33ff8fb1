"""Every option of a verb reaches the function that it calls."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron_fanformer.cli import main
from megatron_fanformer.generation.generate import GenerateConfig
from megatron_fanformer.preparation.prepare import ConversationsConfig, PrepareConfig


def passed_on(function: str, *arguments: str) -> Any:
    """The call of a function of the package that a command line makes."""
    done = SimpleNamespace(lines=lambda *_: [])
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
    assert prepared("a --output o --tokenizer t --from-npy --npy-dtype uint32").npy_dtype == "uint32"
    chats = "a --output o --tokenizer t --chat --chat-template f --learn last --max-tokens 5 --too-long drop"
    assert prepared(chats).chat == ConversationsConfig(template="f", learn="last", max_tokens=5, too_long="drop")
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
    assert passed_on("formats.convert.convert_checkpoint", *options.split()) == mock.call(
        Path("from"),
        Path("there"),
        to="hf",
        config=Path("c"),
        tokenizer=Path("t"),
        eod_id=3,
        dtype="bf16",
        padded_vocab_size=64,
        max_shard_size="1MB",
        verified=False,
        receipt=Path("r.json"),
    )


@pytest.mark.usefixtures("recognised")
def test_options_of_generate() -> None:
    options = (
        "generate run --prompt a --prompt b --num-samples 2 --max-new-tokens 5 --stop x --stop y --temperature 0.5 "
        "--top-k 3 --top-p 0.25 --seed 4 --batch-size 6 --tokenizer t --json"
    )
    call = passed_on("generation.generate.print_generations", *options.split())
    assert call.kwargs == {"as_json": True}
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
    )


def test_options_of_parity() -> None:
    options = (
        "parity --config c.yaml --layouts tp=2 pp=2 --report r --steps 3 --dtype bf16 --communication --device cpu "
        "--transformer-impl local --model.num_layers 2"
    )
    assert passed_on("parity.command.parity", *options.split()) == mock.call(
        Path("c.yaml"),
        ["--model.num_layers", "2"],
        report=Path("r"),
        layouts=("tp=2", "pp=2"),
        steps=3,
        dtype="bf16",
        communication=True,
        device="cpu",
        transformer_impl="local",
    )
