"""Checkpoints of training runs, with their optimizer's state and progress, of several ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fanformer.checkpoint.saving import CheckpointSaver
from megatron_fanformer.formats.recognition import find_checkpoint
from megatron_fanformer.runtime.local_shards import local_shards
from tests.checkpoint.states import small_model, training, world_size
from tests.whole_models import convert_checkpoint, megatron_to_hf, read_huggingface


def train_and_save(layout: str, folder: Path, saved: dict[str, Any]) -> list[tuple[str, Any, Any, torch.Tensor]]:
    """One step, a checkpoint, and this rank's pieces of the weights."""
    from megatron_fanformer.checkpoint.training_state import model_state

    with training(layout, small_model(), dtype=torch.bfloat16) as run:
        run.take_steps(1)
        run.config = lambda: saved  # type: ignore[method-assign]
        run.save(CheckpointSaver(folder, run.grid, keep=None))
        state = model_state(run.stages, run.grid)
        return [(s.key, tuple(s.global_shape), s.global_slice(), s.data.detach().clone()) for s in local_shards(state)]


@pytest.mark.parametrize("layout", ["dp2", "tp2-sp-plain"])
def test_a_runs_checkpoint_is_converted(layout: str, run_on_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    from dataclasses import asdict

    saved = {"model": asdict(small_model()), "precision": {"dtype": "bf16"}}
    ranks = run_on_ranks(world_size(layout), train_and_save, layout, tmp_path / "run", saved)
    whole: dict[str, torch.Tensor] = {}
    for key, shape, where, values in (piece for pieces in ranks for piece in pieces):
        whole.setdefault(key, torch.empty(shape, dtype=torch.bfloat16))[where] = values
    assert find_checkpoint(tmp_path / "run").name == "step-00000001"
    convert_checkpoint(tmp_path / "run", tmp_path / "hf", to="hf")
    config, tensors = read_huggingface(tmp_path / "hf")
    assert config == small_model()
    expected = megatron_to_hf(whole, config)
    assert tensors.keys() == expected.keys()
    assert [name for name in tensors if not torch.equal(tensors[name], expected[name])] == []
