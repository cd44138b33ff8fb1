"""Muon's steps against torch.optim.Muon's, and how its ranks share the matrices."""

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_fanformer.model.config import FANConfig
from megatron_fanformer.plan.matrix_updates import MatrixUpdates, owners, rounds
from megatron_fanformer.plan.memory import rank_memory
from megatron_fanformer.plan.simulation import PEAK_TOLERANCE, run_rank
from megatron_fanformer.train.optimizer import single_optimizers
from megatron_fanformer.train.optimizers import OPTIMIZERS, OptimizerConfig
from megatron_fanformer.train.torch_optimizers import MuonAndAdam
from tests.checkpoint.states import parallel_config, small_model, training
from tests.ops.test_matrices import exact
from tests.plan.runs import job_of, run_config

RECIPE = OptimizerConfig(name="muon", lr=2e-2, weight_decay=0.2)
STEPS = 3
SAME = 1e-5  # norm of the difference over the norm of the change: torch's has the polynomial's exact value
IN_BF16 = 0.04  # the same with products in bf16, as torch's are by themselves: 0.022 was seen

RunOnRanks = Callable[..., list[Any]]


# -- the steps


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


@pytest.mark.parametrize("placement", ["qkv", "qk_and_v", pytest.param("ffn", marks=pytest.mark.full)])
def test_matrices_change_as_by_torchs_muon(run_on_ranks: RunOnRanks, placement: str) -> None:
    (found,) = run_on_ranks(1, changes_with_exact_torch, placement)
    assert len(found) == 2 * {"qkv": 7, "qk_and_v": 6, "ffn": 6}[placement]  # QKV is three, QK two; both FAN maps one
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


@pytest.mark.parametrize("fan_form", ["column", pytest.param("sequence", marks=pytest.mark.full)])
def test_a_simulated_rank_sends_and_holds_what_the_formulas_say(fan_form: str) -> None:
    """Of a world that no test could start, and a model of which an update takes more than a layer's backward."""
    config = run_config(
        dict(hidden_size=256, ffn_hidden_size=1024),
        samples=32,
        micro_batch_size=1,
        tensor_model_parallel_size=4,
        sequence_parallel=True,
        fan_form=fan_form,
    )
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name="muon"))
    simulated = run_rank(config, world_size=32, rank=0)
    sent = sum(term.message_bytes for term in MatrixUpdates(simulated.job, 0).terms(0))
    assert [line.message_bytes for line in simulated.collectives if line.kind == "all-to-all"] == [sent]
    memory = rank_memory(simulated.job, 0)
    assert memory.moment == "update of a matrix"
    assert memory.total_bytes == pytest.approx(simulated.peak_bytes, rel=PEAK_TOLERANCE)
