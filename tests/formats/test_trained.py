"""Checkpoints of training runs, with their optimizer's state and progress, of several ranks."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fanformer.checkpoint.full_tensors import OPTIMIZER_PREFIX
from megatron_fanformer.checkpoint.saving import CheckpointSaver
from megatron_fanformer.formats.recognition import find_checkpoint
from tests.checkpoint.states import Pieces, small_model, training, world_size
from tests.training.layouts import gather
from tests.whole_models import convert_checkpoint, megatron_to_hf, read_huggingface


def train_and_save(layout: str, folder: Path, saved: dict[str, Any]) -> Pieces:
    """One step, a checkpoint, and this rank's pieces of the state."""
    with training(layout, small_model(), dtype=torch.bfloat16) as run:
        run.take_steps(1)
        run.config = lambda: saved  # type: ignore[method-assign]
        run.save(CheckpointSaver(folder, run.grid, keep=None))
        return run.pieces()


@pytest.mark.parametrize("layout", ["dp2", "tp2-sp-plain"])
def test_a_runs_checkpoint_is_converted(layout: str, run_on_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    saved = {"model": asdict(small_model()), "precision": {"dtype": "bf16"}}
    state = gather(run_on_ranks(world_size(layout), train_and_save, layout, tmp_path / "run", saved))
    weights = {name: value.bfloat16() for name, value in state.items() if not name.startswith(OPTIMIZER_PREFIX)}
    assert find_checkpoint(tmp_path / "run").name == "step-00000001"
    convert_checkpoint(tmp_path / "run", tmp_path / "hf", to="hf")
    config, tensors = read_huggingface(tmp_path / "hf")
    assert config == small_model()
    expected = megatron_to_hf(weights, config)
    assert tensors.keys() == expected.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], expected[name])] == []
