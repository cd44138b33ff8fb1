"""Moments in bf16: steps in float32 and rounded, the same in every layout, saved and loaded, counted to the byte."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fanformer.checkpoint.stored_files import STATE_PREFIX, read_table
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.train.optimizers import LARGEST_BF16_DECAY, OptimizerConfig
from megatron_fanformer.train.torch_optimizers import COPIED_ELEMENTS, Adam
from tests.checkpoint import states
from tests.checkpoint.states import Shown, small_model, world_size
from tests.train.layouts import gather

RunOnRanks = Callable[..., list[Any]]

MODEL = small_model(num_layers=2)
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
PAIRS = [pair for pair in itertools.product(FORMATS, FORMATS) if "bf16" in pair]
BOTH = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
SHORT = OptimizerConfig(lr=1e-2, **BOTH)
OF_MUON = OptimizerConfig(name="muon", lr=1e-2, **BOTH)

HALF_ULP = 2.0**-8  # of bf16, relative
SAME_STEP = 2e-6  # of float32, absolute, for weights of about 1


# -- the step


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype).double()


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_step_is_computed_in_float32_and_rounded(first: str, second: str) -> None:
    """By the formulas in float64, from what the step before kept; of a weight of more than one block."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(1030, COPIED_ELEMENTS // 1024, generator=generator))
    assert weight.numel() > COPIED_ELEMENTS
    beta1, beta2, lr, eps, decay = 0.9, 0.95, 1e-2, 1e-5, 0.1
    optimizer = Adam([weight], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=decay)
    dtypes = optimizer.state_dtypes = {"exp_avg": FORMATS[first], "exp_avg_sq": FORMATS[second]}
    kept = {name: torch.zeros(weight.shape, dtype=torch.float64) for name in dtypes}
    for step in range(1, 4):
        before = weight.detach().double()
        weight.grad = torch.randn(weight.shape, generator=generator) * 0.1
        gradient = weight.grad.double()
        optimizer.step()
        exact = {
            "exp_avg": beta1 * kept["exp_avg"] + (1 - beta1) * gradient,
            "exp_avg_sq": beta2 * kept["exp_avg_sq"] + (1 - beta2) * gradient.square(),
        }
        size = (exact["exp_avg_sq"] / (1 - beta2**step)).sqrt() + eps
        expected = before - lr * (exact["exp_avg"] / (1 - beta1**step) / size + decay * before)
        torch.testing.assert_close(weight.detach().double(), expected, atol=SAME_STEP, rtol=0)
        for name, state in optimizer.state[weight].items():
            assert state.dtype == dtypes[name]
            different = state.double() != rounded(exact[name], state.dtype)  # where float32 fell on the other side
            if state.dtype == torch.bfloat16:
                assert different.float().mean() < 1e-4
            error = (state.double() - exact[name]).abs() / exact[name].abs().clamp(min=1e-30)
            assert error[exact[name].abs() > 1e-6].max() < (1.01 * HALF_ULP if state.dtype == torch.bfloat16 else 1e-3)
            kept[name] = state.double()


def test_a_decay_that_rounding_undoes_is_refused() -> None:
    """At the largest that is allowed every number in bf16 decays; a little above one stays as it is."""
    numbers = torch.arange(0x3F80, 0x4000, dtype=torch.int16).view(torch.bfloat16)  # all from 1 to 2
    assert (numbers.float() * LARGEST_BF16_DECAY).bfloat16().lt(numbers).all()
    assert (numbers.float() * (LARGEST_BF16_DECAY + 1e-4)).bfloat16().eq(numbers).any()
    assert _problems(adam_beta2=LARGEST_BF16_DECAY, exp_avg_sq_dtype="bf16") == []
    assert _problems(adam_beta2=0.999, exp_avg_dtype="bf16") == []
    assert _problems(adam_beta2=0.999, exp_avg_sq_dtype="bf16") == [
        "optimizer.adam_beta2 is 0.999 with optimizer.exp_avg_sq_dtype bf16, in which a step's decay above 0.99609375 "
        "is rounded away; set the former to less, or the latter to fp32"
    ]
    of_momentum = {"muon_momentum": 0.998, "exp_avg_dtype": "bf16"}
    assert _problems(**of_momentum) == []
    assert ["muon_momentum" in problem for problem in _problems(name="muon", **of_momentum)] == [True]


def test_muons_momentum_has_the_format_of_the_first_moment() -> None:
    rule = OptimizerConfig(name="muon", exp_avg_dtype="bf16").rule
    assert [rule.state_dtype(name) for name in ("momentum_buffer", "exp_avg", "exp_avg_sq")] == ["bf16", "bf16", "fp32"]
    assert rule.state_bytes("decoder.layers.0.mlp.linear_fc1.weight", 2) == 2


def _problems(**fields: Any) -> list[str]:
    return list(OptimizerConfig(**fields).joint_problems(ParallelConfig()))


# -- checkpoints


def kept_in(pieces: dict[str, torch.Tensor], recipe: OptimizerConfig) -> dict[str, torch.Tensor]:
    """What is kept of stored tensors by a run with other formats."""

    def format_of(name: str) -> torch.dtype:
        state = name.removeprefix(STATE_PREFIX).split(".")[0] if name.startswith(STATE_PREFIX) else ""
        return FORMATS[recipe.rule.state_dtype(state)]

    return {name: tensor.to(format_of(name)).float() for name, tensor in pieces.items()}


LOADS = {
    "shortened": ("dp2", OptimizerConfig(lr=1e-2), "tp2", SHORT),
    "lengthened": ("tp2", SHORT, "dp2", OptimizerConfig(lr=1e-2)),
    "of Muon, one of each": ("dp2", OF_MUON, "tp1-plain", OptimizerConfig(name="muon", exp_avg_sq_dtype="bf16")),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full if "Muon" in n else ()) for n in LOADS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.full)])
def test_moments_load_in_either_format(run_on_ranks: RunOnRanks, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Rounded, where they had been longer; under the same names, in another layout."""
    saved, recipe, loaded, other = LOADS[name]
    ranks: list[Shown] = run_on_ranks(world_size(saved), states.train_and_save, saved, MODEL, dtype, tmp_path, recipe)
    checkpoint = tmp_path / "checkpoints" / "step-00000002"
    others: list[Shown] = run_on_ranks(
        world_size(loaded), states.load_and_train, loaded, MODEL, dtype, checkpoint, other
    )
    before, after = (gather([rank.pieces for rank in each]) for each in (ranks, others))
    expected = kept_in(before, other)
    assert [key for key in expected if not torch.equal(expected[key], after[key])] == []
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert bool(changed) is (name == "shortened")
    table = read_table(checkpoint).state_dict_metadata
    for key in (key for key in before if key.startswith(STATE_PREFIX)):
        state = key.removeprefix(STATE_PREFIX).split(".")[0]
        assert table[key].properties.dtype == FORMATS[recipe.rule.state_dtype(state)]
    assert others[0].next_losses == pytest.approx(ranks[0].next_losses, rel=1e-2)


# -- memory
