"""Simulated ranks against real ones over gloo: the same code, followed by the same tracker, to the byte."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_fanformer.runtime.collectives import CollectiveCount
from megatron_fanformer.runtime.parallel import rank_grid
from megatron_fanformer.simulation.fake_rank import run_rank, take_steps
from megatron_fanformer.simulation.memory_tracker import MemoryTracker
from megatron_fanformer.training.config import RunConfig
from tests.simulation.runs import run_config

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
    "tp, pp": run_config(**TP, **PP, dtype="fp32", use_distributed_optimizer=False),
    "vpp, dp, overlap, full": run_config(
        DEEP, **PP, virtual_pipeline_model_parallel_size=2, **OVERLAP, **FULL, samples=16
    ),
    "tp 4, own values": run_config(dict(fan=dict(placement="qk_and_v")), tensor_model_parallel_size=4),
    "sequence, pp, FAN recomputed": run_config(**SP, **PP, fan_form="sequence", **selective("fan", "mlp")),
    "cp, dp, grouped, selective": run_config(dict(num_query_groups=2), **CP, **selective("core_attn", "layernorm")),
    "pp, cp, untied, uneven": run_config(
        dict(untie_embeddings_and_output_weights=True, num_layers=3),
        **PP,
        **CP,
        num_layers_in_first_pipeline_stage=1,
        dtype="fp32",
    ),
    "dp, overlap, no FAN, Megatron's loss head": run_config(
        dict(fan=dict(placement="none")), **OVERLAP, samples=16, kernels=dict(chunked_loss_head=False)
    ),
    "sp, pp, all modules": run_config(**SP, **PP, **selective("core_attn", "layernorm", "mlp", "fan"), dtype="fp32"),
}
RANKS = 4
ALWAYS = ("sp, dp, selective",)
ALL = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full) for name in CONFIGS]


def resolved(config: RunConfig) -> RunConfig:
    """Without what is left to the machine: simulated ranks choose as over NCCL."""
    overlaps = dict(
        overlap_grad_reduce=bool(config.parallel.overlap_grad_reduce),
        overlap_param_gather=bool(config.parallel.overlap_param_gather),
    )
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **overlaps))


def followed(config: RunConfig) -> tuple[int, int, list[CollectiveCount]]:
    """What this rank holds at its peak and between steps, and what it communicates."""
    tracker = MemoryTracker()
    with tracker, rank_grid(config.parallel, "cpu") as grid:
        _, collectives = take_steps(config, grid, seed=0)
        return tracker.peak_bytes, tracker.held_bytes, collectives


@pytest.mark.parametrize("name", ALL)
def test_a_simulated_rank_is_the_real_one(name: str, run_on_ranks: RunOnRanks) -> None:
    config = resolved(CONFIGS[name])
    for rank, real in enumerate(run_on_ranks(RANKS, followed, config)):
        simulated = run_rank(config, world_size=RANKS, rank=rank, backend="gloo")
        assert (simulated.peak_bytes, simulated.held_bytes, simulated.collectives) == real, f"rank {rank}"


ALLOCATOR_TOLERANCE = 0.03


def allocated(config: RunConfig) -> tuple[int, int]:
    """This rank's peak by the tracker, and by torch's own record of its CPU allocator."""
    tracker = MemoryTracker()
    recorder = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with recorder, tracker, rank_grid(config.parallel, "cpu") as grid:
        take_steps(config, grid, seed=0)
    held = peak = 0
    for event in sorted(recorder.profiler.kineto_results.events(), key=lambda event: event.start_ns()):  # type: ignore
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return tracker.peak_bytes, peak


@pytest.mark.full
@pytest.mark.parametrize("name", ["tp, pp", "tp 4, own values", "sequence, pp, FAN recomputed"])
def test_the_tracker_agrees_with_the_allocator(name: str, run_on_ranks: RunOnRanks) -> None:
    """Where nothing is summed over replicas: gloo's reduce-scatter has temporaries of its own."""
    model = dict(hidden_size=256, ffn_hidden_size=512, seq_length=256, vocab_size=2000)
    config = resolved(CONFIGS[name])
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
    for rank, (tracked, by_allocator) in enumerate(run_on_ranks(RANKS, allocated, config)):
        assert tracked == pytest.approx(by_allocator, rel=ALLOCATOR_TOLERANCE), f"rank {rank}"
