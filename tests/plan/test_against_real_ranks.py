"""Simulated ranks against real ones over gloo: the same code, followed by the same tracker, to the byte."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from megatron_fanformer.plan.memory_tracker import MemoryTracker
from megatron_fanformer.plan.rank import run_rank, take_steps
from megatron_fanformer.runtime.collectives import CollectiveCount
from megatron_fanformer.runtime.parallel import rank_grid
from megatron_fanformer.train.config import RunConfig
from tests.plan.runs import run_config

RunOnRanks = Callable[..., list[Any]]

TP = dict(tensor_model_parallel_size=2)
SP = dict(**TP, sequence_parallel=True)
PP = dict(pipeline_model_parallel_size=2)
CP = dict(context_parallel_size=2)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
OVERLAP = dict(overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=6000)
DEEP = dict(num_layers=4)


def selective(*modules: str) -> dict[str, Any]:
    return dict(recompute_granularity="selective", recompute_modules=list(modules))


# Of four ranks each.
CONFIGS: dict[str, RunConfig] = {
    "sp, dp, selective": run_config(**SP, **selective("core_attn", "layernorm", "mlp")),
    "vpp, dp, overlap, full": run_config(
        DEEP, **PP, virtual_pipeline_model_parallel_size=2, **OVERLAP, **FULL, samples=16
    ),
    "sequence, pp, FAN recomputed": run_config(**SP, **PP, fan_form="sequence", **selective("fan", "mlp")),
    "pp, cp, untied, uneven": run_config(
        dict(untie_embeddings_and_output_weights=True, num_layers=3),
        **PP,
        **CP,
        num_layers_in_first_pipeline_stage=1,
        dtype="fp32",
    ),
    "Muon, tp, dp, moments in bf16": run_config(
        **TP, optimizer=dict(name="muon", exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
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


class FollowedRank(NamedTuple):
    """What a rank holds at its peak and between steps, and what it communicates."""

    peak_bytes: int
    held_bytes: int
    collectives: list[CollectiveCount]


@contextlib.contextmanager
def collectives_unseen() -> Iterator[None]:
    """Without what gloo copies."""
    with mock.patch.object(dist.Work, "wait", unseen(dist.Work.wait)):
        yield


def followed(config: RunConfig) -> FollowedRank:
    tracker = MemoryTracker()
    with collectives_unseen(), tracker, rank_grid(config.parallel, "cpu") as grid:
        _, collectives = take_steps(config, grid, seed=0, tracker=tracker)
        return FollowedRank(tracker.peak_bytes, tracker.held_bytes, collectives)


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


ATTEMPTS = 12
"""gloo's threads may hold on to a tensor after it was waited for, on a busy machine for long, and adds to the peak."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "selective" in name else pytest.mark.full) for name in CONFIGS]
)
def test_a_simulated_rank_is_the_real_one(name: str, run_on_ranks: RunOnRanks) -> None:
    config = resolved(CONFIGS[name])
    simulated = [run_rank(config, world_size=RANKS, rank=rank, backend="gloo") for rank in range(RANKS)]
    expected = [FollowedRank(rank.peak_bytes, rank.held_bytes, rank.collectives) for rank in simulated]
    real = run_on_ranks(RANKS, followed, config)
    for _ in range(ATTEMPTS - 1):
        if real != expected:
            again = run_on_ranks(RANKS, followed, config)
            real = [
                one._replace(
                    peak_bytes=min(one.peak_bytes, two.peak_bytes), held_bytes=min(one.held_bytes, two.held_bytes)
                )
                for one, two in zip(real, again, strict=True)
            ]
    assert real == expected
