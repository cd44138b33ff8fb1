"""Averages of checkpoints: the numbers, what loads them, the memory that they take, and what is refused."""

import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.full_tensors import StoredTensors, write_full_tensors
from megatron_fanformer.checkpoint.saving import CheckpointSaver
from megatron_fanformer.checkpoint.stored_files import MAIN_WEIGHT, read_table
from megatron_fanformer.cli import main
from megatron_fanformer.convert import merge
from megatron_fanformer.convert.name_table import expected_shapes
from megatron_fanformer.convert.recognition import find_checkpoint
from megatron_fanformer.data.chat_template import attached_files
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.model.config import FANformerConfig
from tests.checkpoint.states import small_model, training, world_size
from tests.generate.making import write_tokenizer
from tests.tiny import tiny_model
from tests.whole_models import read_full_tensors

MODEL = tiny_model(vocab_size=90)
SAME_LOSS = 1e-6  # relative, of float32 sums in another order


def train_and_save(layout: str, run: Path, saved: dict[str, Any]) -> None:
    """Save after each of three steps in bf16."""
    with training(layout, small_model(num_layers=2), dtype=torch.bfloat16) as trained:
        trained.config = lambda: saved  # type: ignore[method-assign]
        for _ in range(3):
            trained.take_steps(1)
            trained.save(CheckpointSaver(run, trained.grid, keep=None))


@pytest.fixture(scope="module")
def run(run_on_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in bf16 on two ranks, with a checkpoint of each of its three steps."""
    folder = tmp_path_factory.mktemp("merge") / "run"
    saved = {"model": asdict(small_model(num_layers=2)), "precision": {"dtype": "bf16"}}
    run_on_ranks(world_size("tp2"), train_and_save, "tp2", folder, saved)
    return folder


def merged(*arguments: object) -> Path:
    """The checkpoint of `merge ARGUMENTS`, the last of which is its output."""
    *sources, output = map(str, arguments)
    assert main(["merge", *sources, "--output", output]) == 0
    return find_checkpoint(output)


def test_main_weights_are_averaged_as_numpy_does(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    average = merged(run, "--last", 2, "--weights", 1, 3, tmp_path / "out")
    sources = [StoredTensors(folder, read_table(folder)) for folder in run_folder.complete_checkpoints(run)[-2:]]
    tensors = read_full_tensors(average)
    assert tensors.keys() == expected_shapes(small_model(num_layers=2), "megatron").keys()
    for name, tensor in tensors.items():
        mains = np.stack([source.read(MAIN_WEIGHT + name).numpy() for source in sources]).astype(np.float64)
        exact = np.average(mains, axis=0, weights=[1, 3])
        assert tensor.dtype == torch.float32 and np.array_equal(tensor.numpy(), exact.astype(np.float32)), name
    receipt = json.loads((tmp_path / "out" / "receipt.json").read_text())
    assert [(source["step"], source["weight"]) for source in receipt["sources"]] == [(2, 0.25), (3, 0.75)]
    (file, sums), *_ = receipt["destination"]["files"].items()
    assert sums["sha256"] == sha256_of(average / file)
    assert "the optimizer's state" in capsys.readouterr().out


def test_what_a_run_was_taken_back_from_is_left_out(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / run_folder.CHECKPOINTS / run_folder.LATEST).write_text(f"{run_folder.checkpoint_name(2)}\n")
    merged(tmp_path / "run", "--last", 2, tmp_path / "out")
    receipt = json.loads((tmp_path / "out" / "receipt.json").read_text())
    assert [source["step"] for source in receipt["sources"]] == [1, 2]


# -- of weights alone


def checkpoint_of(
    run: Path,
    seed: int = 0,
    model: FANformerConfig = MODEL,
    dtype: torch.dtype = torch.float32,
    tokenizer: Path | None = None,
) -> Path:
    """A checkpoint of random weights."""
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_shapes(model, "megatron").items()
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes}
    return write_full_tensors(run, tensors, {"model": asdict(model)}, attached_files(tokenizer, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_of_one_checkpoint_with_itself_is_that_checkpoint(dtype: torch.dtype, tmp_path: Path) -> None:
    one = checkpoint_of(tmp_path / "one", dtype=dtype)
    name = "decoder.final_layernorm.weight"
    tensors = {**read_full_tensors(one), name: torch.full((MODEL.hidden_size,), -0.0, dtype=dtype)}
    one = write_full_tensors(tmp_path / "other", tensors, {"model": asdict(MODEL)}, {})
    average = read_full_tensors(merged(one, one, one, "--weights", 1, 3, 7, tmp_path / "out"))
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert [each for each in tensors if not torch.equal(average[each].view(bits), tensors[each].view(bits))] == []


def test_one_tensor_of_one_checkpoint_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [checkpoint_of(tmp_path / name, seed) for seed, name in enumerate("abc")]
    alive: list[weakref.ref[Tensor]] = []
    counts: list[int] = []

    def watched(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*arguments: Any) -> Tensor:
            counts.append(sum(reference() is not None for reference in alive))
            made = function(*arguments)
            alive.append(weakref.ref(made))
            return made

        return call

    monkeypatch.setattr(StoredTensors, "read", watched(StoredTensors.read))
    monkeypatch.setattr(merge, "_average", watched(merge._average))
    merged(*sources, tmp_path / "out")
    tensors = len(expected_shapes(MODEL, "megatron"))
    assert (len(counts), max(counts)) == (tensors * (len(sources) + 1), 0)  # reads and sums


def test_the_tokenizer_of_either_goes_along(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    tokenizer = Path(write_tokenizer(tmp_path / "tokenizer", MODEL.vocab_size))
    with_it = checkpoint_of(tmp_path / "a", 0, MODEL, torch.float32, tokenizer)
    average = merged(checkpoint_of(tmp_path / "b", 1), with_it, tmp_path / "out")
    assert (average / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    assert run_folder.saved_config(average)["precision"] == {"dtype": "fp32"}


# -- refusals


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs with a checkpoint each: a, b, one of another model, two of other tokenizers, and one that is damaged."""
    folder = tmp_path_factory.mktemp("merged")
    for size in (90, 80):
        (folder / f"of-{size}").mkdir()
        tokenizer = Path(write_tokenizer(folder / f"of-{size}", size))
        checkpoint_of(folder / f"tokens-{size}", 0, MODEL, torch.float32, tokenizer)
    checkpoint_of(folder / "a", 0)
    checkpoint_of(folder / "b", 1)
    checkpoint_of(folder / "deeper", 0, tiny_model(vocab_size=90, num_layers=3, rotary_base=500))
    damaged = checkpoint_of(folder / "damaged", 2)
    file = max(damaged.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return folder


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        ("a", "one checkpoint is not an average; name 2 or more, or a run with --last N", 2),
        ("a --last 2", "--last is 2; it must be at least 2, and a has 1 up to its latest", 2),
        ("a b --last 2", "--last takes checkpoints of one run, but 2 are named", 2),
        ("a/checkpoints/step-00000000 --last 2", "is one checkpoint of a run (checkpoints/step-…); name a run's", 2),
        ("a b --weights 1", "--weights states 1, but checkpoints are 2; state one for each", 2),
        ("a b --weights 1 0", "--weights: 0 is not a finite number above 0; leave that checkpoint out", 2),
        ("a b --weights 1 nan", "--weights: nan is not a finite number above 0", 2),
        ("a none", "none does not exist; name a run's folder", 2),
        ("a deeper", "are of different models (num_layers 2 and 3, rotary_base 10000 and 500); name checkpoints", 2),
        ("tokens-90 tokens-80", "are different tokenizers, whose checkpoints have no common average", 2),
        ("a b --output a", "a already exists; name a folder that does not", 2),
        ("a damaged", ".distcp is damaged", 3),
    ],
)
def test_what_is_refused_in_one_line(
    arguments: str,
    message: str,
    code: int,
    others: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(others)
    before = sorted(others.iterdir())
    assert main(["merge", *arguments.split(), *([] if "--output" in arguments else ["--output", "out"])]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(others.iterdir()) == before
