"""The scales of FP8's delayed recipe through a checkpoint; stand-ins for Transformer Engine's layers hold them here."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_fanformer.checkpoint.saving import CheckpointSaver
from megatron_fanformer.checkpoint.training_state import DIRECTIONS
from tests.checkpoint.states import small_model, training

RunOnRanks = Callable[..., list[Any]]
HISTORY = 3


def stand_ins(stages: list[Any], *, recipe: str, history: int = HISTORY) -> Iterator[tuple[str, Any]]:
    """The linear layers of one chunk by name, as if they were Transformer Engine's, and had not run yet."""
    (stage,) = stages
    stage.config.fp8, stage.config.fp8_recipe = "hybrid", recipe
    for name, layer in stage.named_modules():
        if not name.endswith(("linear_proj", "linear_fc2")):
            continue
        layer.fp8_meta = {}
        layer.init_fp8_meta_tensors = lambda _recipe, meta=layer.fp8_meta: meta.update(
            {
                direction: SimpleNamespace(scale=torch.ones(2), amax_history=torch.zeros(history, 2))
                for direction in DIRECTIONS
            }
        )
        yield name, layer


def scales_of(number: int, direction: str) -> tuple[torch.Tensor, torch.Tensor]:
    start = 100.0 * number + (10.0 if direction == "scaling_bwd" else 0.0)
    return start + torch.arange(2.0), start + torch.arange(2.0 * HISTORY).view(HISTORY, 2)


def save(layout: str, recipe: str, folder: Path) -> str:
    with training(layout, small_model()) as run:
        run.take_steps(1)
        for number, (_, layer) in enumerate(stand_ins(run.stages, recipe=recipe)):
            layer.init_fp8_meta_tensors(None)
            for direction in DIRECTIONS:
                layer.fp8_meta[direction].scale, layer.fp8_meta[direction].amax_history = scales_of(number, direction)
        return str(run.save(CheckpointSaver(folder, run.grid, keep=None)))


def load(layout: str, recipe: str, checkpoint: Path, history: int = HISTORY) -> dict[str, Any]:
    with training(layout, small_model(), seed=2) as run:
        layers = list(stand_ins(run.stages, recipe=recipe, history=history))
        run.load(checkpoint)
        run.take_steps(1)
        return {name: layer.fp8_meta for name, layer in layers}


def test_come_back_in_another_layout(run_on_ranks: RunOnRanks, tmp_path: Path) -> None:
    checkpoint = Path(run_on_ranks(2, save, "tp2", "delayed", tmp_path)[0])
    (loaded,) = run_on_ranks(1, load, "tp1-plain", "delayed", checkpoint)
    assert len(loaded) == 8
    for number, meta in enumerate(loaded.values()):
        for direction in DIRECTIONS:
            scale, history = scales_of(number, direction)
            assert torch.equal(meta[direction].scale, scale)
            assert torch.equal(meta[direction].amax_history, history)


def test_into_a_history_of_another_length(run_on_ranks: RunOnRanks, tmp_path: Path) -> None:
    checkpoint = Path(run_on_ranks(1, save, "tp1-plain", "delayed", tmp_path)[0])
    (loaded,) = run_on_ranks(1, load, "tp1-plain", "delayed", checkpoint, HISTORY + 1)
    history = next(iter(loaded.values()))["scaling_fwd"].amax_history
    assert torch.equal(history[:HISTORY], scales_of(0, "scaling_fwd")[1])
    assert not history[HISTORY:].any()


def test_other_recipes_neither_save_nor_ask_for_them(run_on_ranks: RunOnRanks, tmp_path: Path) -> None:
    without = Path(run_on_ranks(1, save, "tp1-plain", "tensorwise", tmp_path / "without")[0])
    assert ".fp8_scales/" not in (without / ".metadata").read_bytes().decode("latin1")
    (loaded,) = run_on_ranks(1, load, "tp1-plain", "delayed", without)
    assert not any(loaded.values())  # they begin anew
    has_them = Path(run_on_ranks(1, save, "tp1-plain", "delayed", tmp_path / "with")[0])
    (loaded,) = run_on_ranks(1, load, "tp1-plain", "blockwise", has_them)
    assert not any(loaded.values())
