"""Moments in bf16, and Muon's steps and its exchange between ranks."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_fanformer.checkpoint.stored_files import STATE_PREFIX, read_table
from megatron_fanformer.model.config import FANConfig
from megatron_fanformer.plan.matrix_updates import MatrixUpdates, owners, rounds
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.train.optimizer import single_optimizers
from megatron_fanformer.train.optimizers import LARGEST_BF16_DECAY, OPTIMIZERS, OptimizerConfig
from megatron_fanformer.train.torch_optimizers import COPIED_ELEMENTS, Adam, MuonAndAdam
from tests.checkpoint import states
from tests.checkpoint.states import Shown, parallel_config, small_model, training, world_size
from tests.ops.test_matrices import exact
from tests.plan.runs import job_of
from tests.small_runs import RunOnRanks
from tests.train.layouts import gather

MODEL = small_model(num_layers=2)
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
PAIRS = [pair for pair in itertools.product(FORMATS, FORMATS) if "bf16" in pair]

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
    """Return stored tensors rounded to the formats of another recipe."""

    def format_of(name: str) -> torch.dtype:
        state = name.removeprefix(STATE_PREFIX).split(".")[0] if name.startswith(STATE_PREFIX) else ""
        return FORMATS[recipe.rule.state_dtype(state)]

    return {name: tensor.to(format_of(name)).float() for name, tensor in pieces.items()}


LONG, SHORT = OptimizerConfig(lr=1e-2), OptimizerConfig(lr=1e-2, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")


@pytest.mark.parametrize(
    ("saved", "recipe", "loaded", "other"), [("dp2", LONG, "tp2", SHORT), ("tp2", SHORT, "dp2", LONG)]
)
def test_moments_load_in_either_format(
    run_on_ranks: RunOnRanks, tmp_path: Path, saved: str, recipe: OptimizerConfig, loaded: str, other: OptimizerConfig
) -> None:
    """Rounded, where they had been longer; under the same names, in another layout."""
    dtype = torch.bfloat16
    ranks: list[Shown] = run_on_ranks(world_size(saved), states.train_and_save, saved, MODEL, dtype, tmp_path, recipe)
    checkpoint = tmp_path / "checkpoints" / "step-00000002"
    others: list[Shown] = run_on_ranks(
        world_size(loaded), states.load_and_train, loaded, MODEL, dtype, checkpoint, other
    )
    before, after = (gather([rank.pieces for rank in each]) for each in (ranks, others))
    expected = kept_in(before, other)
    assert [key for key in expected if not torch.equal(expected[key], after[key])] == []
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert bool(changed) is (other == SHORT)
    table = read_table(checkpoint).state_dict_metadata
    for key in (key for key in before if key.startswith(STATE_PREFIX)):
        state = key.removeprefix(STATE_PREFIX).split(".")[0]
        assert table[key].properties.dtype == FORMATS[recipe.rule.state_dtype(state)]
    assert others[0].next_losses == pytest.approx(ranks[0].next_losses, rel=1e-2)


# -- Muon's steps against torch.optim.Muon's, and how its ranks share the matrices

RECIPE = OptimizerConfig(name="muon", lr=2e-2, weight_decay=0.2)
STEPS = 3
SAME = 1e-5  # norm of the difference over the norm of the change: torch's has the polynomial's exact value
IN_BF16 = 0.04  # the same with products in bf16, as torch's are by themselves: 0.022 was seen


def parts_of(matrix: Any, tensor: Tensor) -> list[Tensor]:
    """Queries, keys and values of all groups apart, or the whole."""
    if not matrix.rows_of_group:
        return [tensor.view(matrix.shard)]
    by_group = tensor.view(matrix.shard).unflatten(0, (-1, sum(matrix.rows_of_group)))
    return [part.flatten(0, 1) for part in by_group.split(matrix.rows_of_group, dim=1)]


def changes_of_both(placement: str, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """What the steps add to each matrix: ours, and torch's from the same gradients."""
    model = small_model(num_layers=2, fan=FANConfig(placement=placement))
    with training("tp1-plain", model, recipe=RECIPE) as run:
        (part,) = single_optimizers(run.optimizer)
        settings = part.optimizer.settings
        settings.dtype = dtype  # on CPUs it is float32
        starts = [[each.clone() for each in parts_of(matrix, matrix.main.detach())] for matrix in settings.matrices]
        copies = [[torch.nn.Parameter(each.clone()) for each in of_matrix] for of_matrix in starts]
        options = dict(lr=0.0, weight_decay=0.2, momentum=0.95, adjust_lr_fn="match_rms_adamw")
        torchs = torch.optim.Muon([each for of_matrix in copies for each in of_matrix], **options)
        step = MuonAndAdam.step

        def both(optimizer: MuonAndAdam) -> None:
            torchs.param_groups[0]["lr"] = part.param_groups[0]["lr"]
            for matrix, of_matrix in zip(settings.matrices, copies, strict=True):
                for copy, grad in zip(of_matrix, parts_of(matrix, matrix.main.grad), strict=True):
                    copy.grad = grad.clone()
            torchs.step()
            step(optimizer)

        with mock.patch.object(MuonAndAdam, "step", both):
            run.take_steps(STEPS)
        return [
            (ours - before, copy.detach() - before)
            for matrix, of_matrix, begun in zip(settings.matrices, copies, starts, strict=True)
            for ours, copy, before in zip(parts_of(matrix, matrix.main.detach()), of_matrix, begun, strict=True)
        ]


def changes_with_exact_torch(placement: str) -> list[tuple[Tensor, Tensor]]:
    def by_svd(grad: Tensor, _coefficients: Any, steps: int, _eps: float) -> Tensor:
        return exact(grad, steps).float()

    with mock.patch("torch.optim._muon._zeropower_via_newtonschulz", by_svd):
        return changes_of_both(placement, torch.float32)


@pytest.mark.parametrize("placement", ["qkv", "qk_and_v"])
def test_matrices_change_as_by_torchs_muon(run_on_ranks: RunOnRanks, placement: str) -> None:
    (found,) = run_on_ranks(1, changes_with_exact_torch, placement)
    assert len(found) == 2 * {"qkv": 7, "qk_and_v": 6}[placement]  # QKV is three, QK two; both FAN maps one
    for ours, torchs in found:
        assert (ours - torchs).norm() <= SAME * torchs.norm()


def test_in_bf16_they_change_as_by_torchs_muon_as_it_is(run_on_ranks: RunOnRanks) -> None:
    (found,) = run_on_ranks(1, changes_of_both, "qkv", torch.bfloat16)
    for ours, torchs in found:
        assert (ours - torchs).norm() <= IN_BF16 * torchs.norm()


# -- the shares


def test_each_matrix_has_an_owner_and_loads_are_even() -> None:
    flops = [5, 9, 1, 7, 7, 3, 2, 8]
    owner = owners(flops, 3)
    loads = [sum(cost for cost, rank in zip(flops, owner, strict=True) if rank == own) for own in range(3)]
    assert sorted(loads) == [14, 14, 14]
    for matrices in rounds(owner):
        assert len({owner[matrix] for matrix in matrices}) == len(matrices)
    assert sorted(matrix for matrices in rounds(owner) for matrix in matrices) == list(range(len(flops)))


def exchanged_by_each_rank(layout: str) -> tuple[list[int], list[int], int]:
    """Elements of each matrix on this rank, the owners, and its momentum's elements."""
    with training(layout, small_model(num_layers=2), recipe=RECIPE) as run:
        run.take_steps(1)
        (part,) = single_optimizers(run.optimizer)
        settings = part.optimizer.settings
        held = [0 if matrix.main is None else matrix.main.numel() for matrix in settings.matrices]
        momenta = [state["momentum_buffer"].numel() for state in part.optimizer.state.values() if len(state) == 1]
        return held, settings.owner, sum(momenta)


@pytest.mark.parametrize("layout", ["dp2", "tp2-dp2"])
def test_ranks_share_momenta_and_products(run_on_ranks: RunOnRanks, layout: str) -> None:
    parallel = parallel_config(layout)
    ranks = run_on_ranks(parallel.model_parallel_size * 2, exchanged_by_each_rank, layout)
    model = small_model(num_layers=2)
    job = dataclasses.replace(job_of(model, parallel), optimizer=OPTIMIZERS["muon"])
    matrices = MatrixUpdates(job, 0).matrices
    assert [sum(parts) for parts in zip(*(held for held, _, _ in ranks), strict=True)] == [
        matrix.rows * matrix.columns for matrix in matrices
    ]
    assert all(momenta == sum(held) for held, _, momenta in ranks)
    assert all(owner == ranks[0][1] for _, owner, _ in ranks)
    assert set(ranks[0][1]) == set(range(len(ranks)))
