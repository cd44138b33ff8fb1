"""An optimizer by name, its parameter groups, and those beside AdamW: Muon, and one of one file and one entry."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.stored_files import MAIN_WEIGHT, STATE_PREFIX
from megatron_fanformer.checkpoint.training_state import set_groups
from megatron_fanformer.configuration import field_texts
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.plan.gradient_buffers import EMBEDDING
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.optimizers import OPTIMIZERS, OptimizerConfig
from megatron_fanformer.train.preflight import _resume_problems
from tests.checkpoint import states
from tests.checkpoint.states import Shown, layers_for, small_model, training, world_size
from tests.small_runs import RunOnRanks, small_run, write_config
from tests.train.layouts import gather
from tests.train.momentum import NAME, registered

SAVED = {"lr": 1e-3, "max_lr": 2e-3, "min_lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "step": 7, "weight_decay": 0.1}
PRESENT = {"lr": 4e-3, "max_lr": 5e-3, "min_lr": 0.0, "betas": (0.8, 0.99), "eps": 1e-5, "weight_decay": 0.3}


def test_rates_betas_and_epsilon_are_the_present_ones_after_a_resume() -> None:
    optimizer: Any = SimpleNamespace(param_groups=[{**PRESENT, "wd_mult": 1.0}, {**PRESENT, "eps": 1e-4}])
    set_groups(optimizer, [{**SAVED, "wd_mult": 1.0}, SAVED], OPTIMIZERS["adamw"].resumed_entries)
    assert optimizer.param_groups == [{**PRESENT, "wd_mult": 1.0, "step": 7}, {**PRESENT, "eps": 1e-4, "step": 7}]


def test_another_name_is_refused_with_the_nearest() -> None:
    assert OptimizerConfig().problems() == []
    assert OptimizerConfig(name="Adam").problems() == [
        "optimizer.name is 'Adam', which is no optimizer here; did you mean adamw?"
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_entry_is_complete(name: str) -> None:
    """Documented, equal to its copy in another process, and with states for every kind of weight."""
    rule = OPTIMIZERS[name]
    assert f"`{name}`" in field_texts(OptimizerConfig)["name"]
    assert rule == type(rule)() and hash(rule) == hash(type(rule)())
    for weight, dimensions in ((EMBEDDING, 2), ("linear_fc1.weight", 2), ("final_layernorm.weight", 1)):
        states = rule.state_names(rule.group_entries(weight, dimensions))
        assert rule.state_bytes(weight, dimensions) == 4 * len(states)


@pytest.mark.parametrize("saved", ["adamw", "momentum"])
def test_a_run_goes_on_with_its_own(tmp_path: Path, saved: str) -> None:
    config = config_from_dict(small_run("tokens", tmp_path / "run"))
    values = config.as_dict()
    values["optimizer"]["name"] = saved
    checkpoint = tmp_path / "step-00000001"
    checkpoint.mkdir()
    write_config(checkpoint / run_folder.CONFIG, values)
    refused = [
        f"optimizer.name is adamw, but the run in {tmp_path / 'run'} has {saved}; change it back, or name another "
        "training.run_dir, which checkpoint.load starts from this one's weights"
    ]
    assert _resume_problems(checkpoint, config, "train_iters") == (refused if saved == "momentum" else [])


# -- optimizers beside AdamW do all that it does


NAMES = (pytest.param(NAME, marks=pytest.mark.full), "muon")  # Muon shows in each run what both do
BUFFER = "momentum_buffer"
LR = {NAME: 2e-2, "muon": 1e-2}
MODEL = small_model(num_layers=2)
SAME_LOSS = 1e-6  # relative, between layouts


def with_it(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns where the optimizer is registered."""
    with registered():
        return function(*arguments)


def recipe_of(name: str) -> OptimizerConfig:
    return OptimizerConfig(name=name, lr=LR[name], weight_decay=0.2)


def losses_of(layout: str, recipe: OptimizerConfig, model: FANformerConfig = MODEL) -> list[float]:
    with training(layout, model, recipe=recipe) as run:
        return run.take_steps(6)


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        pytest.param(NAME, ("dp2", "tp2"), marks=pytest.mark.full),
        ("muon", ("dp2", "fan-sequence-plain")),
    ],
)
def test_layouts_have_equal_losses(run_on_ranks: RunOnRanks, name: str, layouts: tuple[str, ...]) -> None:
    recipe, model = recipe_of(name), small_model(num_layers=layers_for(*layouts))
    alone, *others = (
        run_on_ranks(world_size(layout), with_it, losses_of, layout, recipe, model)
        for layout in ("tp1-plain", *layouts)
    )
    of_adamw = run_on_ranks(1, with_it, losses_of, "tp1-plain", dataclasses.replace(recipe, name="adamw"), model)
    assert alone[0][0] == of_adamw[0][0] and alone[0][1] != of_adamw[0][1]
    for losses in others:
        assert losses[0] == pytest.approx(alone[0], rel=SAME_LOSS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("saved", "loaded", "dtype"),
    [("dp2", "tp2", torch.bfloat16), ("tp2", "tp1-plain", torch.float32)],
    ids=["dp2-tp2", "tp2-plain"],
)
def test_a_checkpoint_loads_in_another_layout(
    run_on_ranks: RunOnRanks, tmp_path: Path, saved: str, loaded: str, dtype: torch.dtype, name: str
) -> None:
    recipe = recipe_of(name)
    ranks: list[Shown] = run_on_ranks(
        world_size(saved), with_it, states.train_and_save, saved, MODEL, dtype, tmp_path, recipe
    )
    checkpoint = tmp_path / "checkpoints" / "step-00000002"
    others: list[Shown] = run_on_ranks(
        world_size(loaded), with_it, states.load_and_train, loaded, MODEL, dtype, checkpoint, recipe
    )
    before, after = (gather([rank.pieces for rank in each]) for each in (ranks, others))
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    by_state = {name.removeprefix(STATE_PREFIX).split(".")[0] for name in before if name.startswith(STATE_PREFIX)}
    assert by_state - {MAIN_WEIGHT.removeprefix(STATE_PREFIX)[:-1]} == {BUFFER, "exp_avg", "exp_avg_sq"}
    assert f"{STATE_PREFIX}exp_avg.decoder.layers.0.mlp.linear_fc1.weight" not in before
    assert others[0].next_losses == pytest.approx(
        ranks[0].next_losses, rel=SAME_LOSS if dtype == torch.float32 else 1e-2
    )
