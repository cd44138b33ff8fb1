"""Simulated ranks against real ones over gloo and against the formula of communication; the tracker of memory."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from megatron_fanformer.plan.live_tensors import MemoryTracker
from megatron_fanformer.runtime.parallel import rank_grid
from megatron_fanformer.train import step
from megatron_fanformer.train.config import RunConfig
from tests.plan.runs import run_config
from tests.plan.simulated_rank import SimulatedRank, run_rank, take_steps

# -- the tracker

KB = 256  # elements of a float32 tensor that takes a KiB


def test_storages_are_counted_once_and_until_the_last_view_goes() -> None:
    tracker = MemoryTracker()
    with tracker:
        whole = torch.zeros(4 * KB)
        half = whole[: 2 * KB].view(2, KB)
        half.add_(1)
        del whole
        assert tracker.held_bytes == 4096
        half.untyped_storage().resize_(0)
        assert tracker.held_bytes == 0
        half.untyped_storage().resize_(2048)
        del half
        assert (tracker.held_bytes, tracker.peak_bytes) == (0, 4096)
        inside = torch.zeros(KB)
    torch.zeros(8 * KB)  # outside nothing is followed
    inside.untyped_storage().resize_(0)
    assert (tracker.held_bytes, tracker.peak_bytes) == (1024, 4096)


# -- against real ranks

RunOnRanks = Callable[..., list[Any]]

SP = dict(tensor_model_parallel_size=2, sequence_parallel=True)
PP = dict(pipeline_model_parallel_size=2)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
OVERLAP = dict(overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=6000)


def selective(*modules: str) -> dict[str, Any]:
    return dict(recompute_granularity="selective", recompute_modules=list(modules))


# Of four ranks each.
CONFIGS: dict[str, RunConfig] = {
    "sp, dp, selective": run_config(**SP, **selective("core_attn", "layernorm", "mlp")),
    "vpp, dp, overlap, full": run_config(
        dict(num_layers=4), **PP, virtual_pipeline_model_parallel_size=2, **OVERLAP, **FULL, samples=16
    ),
    "sequence, pp, FAN recomputed": run_config(**SP, **PP, fan_form="sequence", **selective("fan", "mlp")),
    "pp, cp, untied, uneven": run_config(
        dict(untie_embeddings_and_output_weights=True, num_layers=3),
        **PP,
        context_parallel_size=2,
        num_layers_in_first_pipeline_stage=1,
        dtype="fp32",
    ),
    "Muon, tp, dp, moments in bf16": run_config(
        tensor_model_parallel_size=2, optimizer=dict(name="muon", exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    ),
}
RANKS = 4


def resolved(config: RunConfig) -> RunConfig:
    """Without what is left to the machine: simulated ranks choose as over NCCL."""
    overlaps = dict(
        overlap_grad_reduce=bool(config.parallel.overlap_grad_reduce),
        overlap_param_gather=bool(config.parallel.overlap_param_gather),
    )
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **overlaps))


def real_rank(config: RunConfig) -> SimulatedRank:
    tracker, wait = MemoryTracker(), dist.Work.wait

    def unseen(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return wait(*args, **kwargs)

    # gloo's copies are not counted.
    with mock.patch.object(dist.Work, "wait", unseen), tracker, rank_grid(config.parallel, "cpu") as grid:
        return take_steps(config, grid, tracker, seed=0)


ATTEMPTS = 12
"""gloo's threads may hold on to a tensor after it was waited for, on a busy machine for long, and adds to the peak."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "selective" in name else pytest.mark.full) for name in CONFIGS]
)
def test_a_simulated_rank_is_the_real_one(name: str, run_on_ranks: RunOnRanks) -> None:
    config = resolved(CONFIGS[name])
    expected = [run_rank(config, world_size=RANKS, rank=rank, backend="gloo") for rank in range(RANKS)]
    real = run_on_ranks(RANKS, real_rank, config)
    for _ in range(ATTEMPTS - 1):
        if real != expected:
            again = run_on_ranks(RANKS, real_rank, config)
            real = [
                one._replace(
                    peak_bytes=min(one.peak_bytes, two.peak_bytes), held_bytes=min(one.held_bytes, two.held_bytes)
                )
                for one, two in zip(real, again, strict=True)
            ]
    assert real == expected


# -- against the formula of communication


def test_ranks_of_a_stage_own_different_matrices() -> None:
    """With Muon: what each sends depends on its number among the stage's ranks."""
    config = run_config(tensor_model_parallel_size=2, **PP, optimizer=dict(name="muon"))
    ranks = [run_rank(config, world_size=8, rank=rank) for rank in (4, 7)]
    moved = [sum(line.message_bytes for line in rank.collectives) for rank in ranks]
    assert moved[0] != moved[1]
    assert [rank.differing() for rank in ranks] == [set(), set()]


def test_a_world_of_1024_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything at once, in one layout: the ends of a pipeline, and a shape that no padding fits by itself; and a
    bucket that is padded otherwise shows."""
    config = run_config(
        dict(num_layers=4, num_query_groups=2),
        samples=1024,
        **SP,
        **PP,
        virtual_pipeline_model_parallel_size=2,
        ddp_bucket_size=6000,
        **selective("core_attn", "mlp"),
    )
    for rank in (0, 512):
        assert run_rank(config, world_size=1024, rank=rank).differing() == set()
    padded = functools.partial(step.DistributedDataParallelConfig, pad_buckets_for_high_nccl_busbw=True)
    monkeypatch.setattr(step, "DistributedDataParallelConfig", padded)
    assert run_rank(config, world_size=1024, rank=514).differing() == {"dp_cp all-gather", "dp_cp reduce-scatter"}
