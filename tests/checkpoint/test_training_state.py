"""A checkpoint of any layout and optimizer loads in any other: weights, optimizer state and FP8 scales, bit for bit.

Stand-ins for Transformer Engine's layers hold the scales.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from megatron_fanformer.checkpoint.saving import CheckpointSaver
from megatron_fanformer.checkpoint.stored_files import MAIN_WEIGHT
from megatron_fanformer.checkpoint.training_state import (
    DIRECTIONS,
    _stored_groups,
    model_state,
    rectangles,
    stored_state,
)
from megatron_fanformer.model.config import FANConfig
from megatron_fanformer.train.optimizers import OptimizerConfig
from tests.checkpoint.states import (
    LAYOUTS,
    Shown,
    layers_for,
    load_and_train,
    small_model,
    train_and_save,
    training,
    world_size,
)
from tests.train.layouts import gather

SAME_LOSS = 1e-6  # relative, between layouts, in float32: sums are taken in another order
SAME_LOSS_BF16 = 2e-3  # activations round at other places in other layouts
DTYPES = {"fp32": (torch.float32, SAME_LOSS), "bf16": (torch.bfloat16, SAME_LOSS_BF16)}

FFN = FANConfig(placement="ffn", activation="gelu")
"""Its second map is sharded by columns, which lie in three runs: cos, sin, g."""


def pair(saved: str, loaded: str, dtype: str = "fp32", *, full: bool = False, **fields: Any) -> Any:
    """A layout that a checkpoint is saved in, one that it is loaded in, and what the model is besides."""
    fields = {"num_layers": layers_for(saved, loaded), **fields}
    return pytest.param(saved, loaded, dtype, fields, marks=pytest.mark.full if full else ())


# Every layout of two ranks is saved or loaded once, every kind of optimizer both but that of several instances.
PAIRS = [
    ("tp2", "dp2-plain"),
    ("vpp2", "tp2-sp-plain"),
    ("dp2-overlap", "cp2"),
    ("fan-sequence-plain", "pp2"),
    ("dp2", "tp1-plain"),
    ("cp2-dp2-instances", "dp2"),
]
CASES = [
    *(pair(*each) for each in PAIRS),
    *(pair(a, b, full=True) for a in LAYOUTS for b in LAYOUTS if (a, b) not in PAIRS),
    pair("tp2", "tp1-plain", "bf16"),
    pair("pp2", "tp1-plain", untie_embeddings_and_output_weights=True),
    pair("tp2-sp-plain", "dp2", fan=FFN),
    pair("pp2", "tp2-dp2", "bf16", full=True, fan=FFN),
]

FEW = {"num_layers": 2}  # unless stages are cut into chunks

RunOnRanks = Callable[..., list[Any]]


class Saved(NamedTuple):
    checkpoint: Path
    ranks: list[Shown]


SavedIn = Callable[..., Saved]


@pytest.fixture(scope="module")
def saved_in(run_on_ranks: RunOnRanks, tmp_path_factory: pytest.TempPathFactory) -> SavedIn:
    """The checkpoint of a layout, made when first asked for."""
    made: dict[Any, Saved] = {}

    def saved(layout: str, dtype: str, **fields: Any) -> Saved:
        fields = {**FEW, **fields}
        key = (layout, dtype, *fields.items())
        if key not in made:
            run = tmp_path_factory.mktemp(layout)
            arguments = (layout, small_model(**fields), DTYPES[dtype][0], run)
            ranks = run_on_ranks(world_size(layout), train_and_save, *arguments)
            made[key] = Saved(run / "checkpoints" / "step-00000002", ranks)
        return made[key]

    return saved


@pytest.mark.parametrize(("saved", "loaded", "dtype", "fields"), CASES)
def test_the_state_is_the_same_in_every_layout(
    run_on_ranks: RunOnRanks, saved_in: SavedIn, saved: str, loaded: str, dtype: str, fields: dict[str, Any]
) -> None:
    there = saved_in(saved, dtype, **fields)
    kind, same_loss = DTYPES[dtype]
    ranks = run_on_ranks(
        world_size(loaded), load_and_train, loaded, small_model(**{**FEW, **fields}), kind, there.checkpoint
    )
    before, after = (gather([rank.pieces for rank in each]) for each in (there.ranks, ranks))
    assert before.keys() == after.keys()
    assert sum("exp_avg_sq" in name for name in before) > 10
    assert any(name.startswith(MAIN_WEIGHT) for name in before) is (dtype == "bf16")
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    groups = {group["wd_mult"]: group for rank in there.ranks for group in rank.groups}
    assert {group["step"] for group in groups.values()} == {2}
    assert [group for rank in ranks for group in rank.groups if group != groups[group["wd_mult"]]] == []
    assert ranks[0].next_losses == pytest.approx(there.ranks[0].next_losses, rel=same_loss, abs=0)


def shards_before_and_after_an_update(recipe: OptimizerConfig) -> list[list[tuple[Any, ...]]]:
    """What a checkpoint would have of the optimizer, at either time."""
    states = []
    with training("dp2", small_model(**FEW), dtype=torch.bfloat16, recipe=recipe) as run:
        for steps in (0, 1):
            run.take_steps(steps)
            shards = stored_state(run.optimizer, model_state(run.stages, run.grid))["optimizer_tensors"].values()
            states.append([(each.key, each.dtype, each.global_offset, each.local_shape) for each in shards])
    return states


@pytest.mark.parametrize(
    "recipe",
    [OptimizerConfig(), OptimizerConfig(exp_avg_dtype="bf16"), OptimizerConfig(name="muon")],
    ids=["adamw", "bf16", "muon"],
)
def test_the_shards_are_the_same_before_the_first_update(run_on_ranks: RunOnRanks, recipe: OptimizerConfig) -> None:
    """Ranks write every checkpoint as they divided the first."""
    for before, after in run_on_ranks(2, shards_before_and_after_an_update, recipe):
        assert before == after
        assert any("exp_avg" in name for name, *_ in after) and any(MAIN_WEIGHT in name for name, *_ in after)


def gathered(ranks: list[Shown], prefix: str = "") -> dict[str, torch.Tensor]:
    """Whole tensors of a state whose names begin with something, by the rest of their names."""
    whole = gather([rank.pieces for rank in ranks])
    return {name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)}


@pytest.mark.parametrize("loaded", ["tp1-plain", "dp2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_main_weights_of_a_run_in_bf16_are_the_weights_of_one_in_float32(
    run_on_ranks: RunOnRanks, saved_in: SavedIn, dtype: str, loaded: str
) -> None:
    """A run of either goes on from the other's."""
    saved, other = saved_in("tp2", dtype), torch.float32 if dtype == "bf16" else torch.bfloat16
    ranks = run_on_ranks(world_size(loaded), load_and_train, loaded, small_model(**FEW), other, saved.checkpoint)
    in_bf16, in_float32 = (saved.ranks, ranks) if dtype == "bf16" else (ranks, saved.ranks)
    main, weights = gathered(in_bf16, MAIN_WEIGHT), gathered(in_float32)
    assert len(main) > 10
    assert [name for name in main if not torch.equal(main[name], weights[name])] == []


def test_groups_without_weights_on_this_rank_have_the_common_step() -> None:
    groups = [{"params": [], "lr": 0.1}, {"params": [1], "lr": 0.2, "step": 5}]
    stored = _stored_groups(SimpleNamespace(param_groups=groups))
    assert stored == [{"lr": 0.1, "step": 5}, {"lr": 0.2, "step": 5}]


# -- ranges as rectangles


@pytest.mark.parametrize("shape", [(7,), (1, 5), (4, 3), (3, 1)])
def test_rectangles_are_the_range_and_nothing_else(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    for start in range(math.prod(shape) + 1):
        for end in range(math.prod(shape) + 1):
            found = []
            for first, offset, extent in rectangles(shape, start, end):
                part = numbers[tuple(slice(o, o + e) for o, e in zip(offset, extent, strict=True))].flatten()
                assert part.tolist() == list(range(first, first + len(part)))
                found += part.tolist()
            assert found == list(range(start, end))
            assert len(list(rectangles(shape, start, end))) <= 3


# -- FP8's scales

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


def save_scales(layout: str, recipe: str, folder: Path) -> str:
    with training(layout, small_model()) as run:
        run.take_steps(1)
        for number, (_, layer) in enumerate(stand_ins(run.stages, recipe=recipe)):
            layer.init_fp8_meta_tensors(None)
            for direction in DIRECTIONS:
                layer.fp8_meta[direction].scale, layer.fp8_meta[direction].amax_history = scales_of(number, direction)
        return str(run.save(CheckpointSaver(folder, run.grid, keep=None)))


def load_scales(layout: str, recipe: str, checkpoint: Path, history: int = HISTORY) -> dict[str, Any]:
    with training(layout, small_model(), seed=2) as run:
        layers = list(stand_ins(run.stages, recipe=recipe, history=history))
        run.load(checkpoint)
        run.take_steps(1)
        return {name: layer.fp8_meta for name, layer in layers}


@pytest.mark.parametrize("length", [HISTORY, HISTORY + 1])
def test_scales_come_back_in_another_layout(run_on_ranks: RunOnRanks, tmp_path: Path, length: int) -> None:
    """Also into a history of another length."""
    checkpoint = Path(run_on_ranks(2, save_scales, "tp2", "delayed", tmp_path)[0])
    (loaded,) = run_on_ranks(1, load_scales, "tp1-plain", "delayed", checkpoint, length)
    assert len(loaded) == 8
    for number, meta in enumerate(loaded.values()):
        for direction in DIRECTIONS:
            scale, history = scales_of(number, direction)
            assert torch.equal(meta[direction].scale, scale)
            assert torch.equal(meta[direction].amax_history[:HISTORY], history)
            assert not meta[direction].amax_history[HISTORY:].any()


def test_other_recipes_neither_save_nor_load_scales(run_on_ranks: RunOnRanks, tmp_path: Path) -> None:
    without = Path(run_on_ranks(1, save_scales, "tp1-plain", "tensorwise", tmp_path / "without")[0])
    assert ".fp8_scales/" not in (without / ".metadata").read_bytes().decode("latin1")
    (loaded,) = run_on_ranks(1, load_scales, "tp1-plain", "delayed", without)
    assert not any(loaded.values())  # they begin anew
    has_them = Path(run_on_ranks(1, save_scales, "tp1-plain", "delayed", tmp_path / "with")[0])
    (loaded,) = run_on_ranks(1, load_scales, "tp1-plain", "blockwise", has_them)
    assert not any(loaded.values())
