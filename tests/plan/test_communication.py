"""The formulas of a step's communication, weights and states against real ranks', which they must equal exactly."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from megatron_fanformer.model.config import PrecisionConfig
from megatron_fanformer.plan.gradient_buffers import Weight, gradient_buffer
from megatron_fanformer.plan.live_tensors import MemoryTracker
from megatron_fanformer.runtime.parallel import rank_grid
from megatron_fanformer.train.config import RunConfig
from tests.plan.runs import run_config
from tests.plan.simulated_rank import SimulatedRank, take_steps
from tests.train.layouts import layout

RunOnRanks = Callable[..., list[Any]]

TP = dict(tensor_model_parallel_size=2)
SP = dict(**TP, sequence_parallel=True)
SEQUENCE = dict(**SP, fan_form="sequence")
PP = dict(pipeline_model_parallel_size=2)
CP = dict(context_parallel_size=2)
DP = dict(data_parallel_size=2)
OVERLAP = dict(overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=6000)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SELECTIVE = dict(recompute_granularity="selective", recompute_modules=["core_attn", "layernorm", "mlp"])
FAN_AGAIN = dict(recompute_granularity="selective", recompute_modules=["fan", "mlp"])
TRANSFORMER = dict(fan=dict(placement="none"))
OWN_VALUES = dict(fan=dict(placement="qk_and_v", v_p_ratio=0.125))
FFN = dict(fan=dict(placement="ffn", activation="gelu"))
GROUPED = dict(num_query_groups=2)
DOCUMENTS = dict(reset_attention_mask=True)

fp32 = partial(run_config, dtype="fp32")
CASES: dict[str, RunConfig] = {
    "tp, no bias, bf16": run_config(dict(fan=dict(bias=False, p_ratio=0.125)), **TP),
    "sp, transformer, norms of heads": fp32({**TRANSFORMER, "qk_layernorm": True}, **SP),
    "sp, own values, grouped": fp32({**OWN_VALUES, **GROUPED}, **SP),
    "sp, own values, FAN recomputed": fp32(OWN_VALUES, **SP, **FAN_AGAIN),
    "sp, FAN layers for the MLP": fp32(FFN, **SP, **SELECTIVE),
    "sequence, recomputed": fp32(GROUPED, **SEQUENCE, **FULL),
    "cp, selective": fp32(**CP, **SELECTIVE),
    "cp, by heads, within documents": fp32(data=DOCUMENTS, **CP, cp_comm_type="a2a", **SELECTIVE),
    "dp plain": fp32(**DP, use_distributed_optimizer=False),
    "dp, bf16": run_config(**DP),
    "dp, bf16 gradients": dataclasses.replace(
        run_config(**DP), precision=PrecisionConfig(dtype="bf16", grad_reduce_in_fp32=False)
    ),
    "dp in two instances": run_config(**DP, num_distributed_optimizer_instances=2),
    "moments in bf16": run_config(**DP, optimizer={"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}),
    "muon": run_config(**DP, optimizer={"name": "muon", "exp_avg_dtype": "bf16"}),
    "dp, overlap": fp32(**DP, **OVERLAP),
    "pp, uneven": fp32(dict(num_layers=3), **PP, num_layers_in_first_pipeline_stage=1),
    "vpp": fp32(dict(num_layers=4), **PP, virtual_pipeline_model_parallel_size=2),
    "sp, loss in chunks": fp32(
        dict(untie_embeddings_and_output_weights=True), kernels=dict(loss_head_chunk_tokens=32), **SP
    ),
    "sp, Megatron's loss head": fp32(kernels=dict(chunked_loss_head=False), **SP),
    "tp, within documents": fp32(data=DOCUMENTS, **TP),
}


def count_step(config: RunConfig) -> SimulatedRank:
    with rank_grid(config.parallel, "cpu") as grid:
        return take_steps(config, grid, MemoryTracker(), seed=0)


@pytest.mark.parametrize("name", CASES)
def test_formula_is_the_count_exactly(name: str, run_on_ranks: RunOnRanks) -> None:
    for rank in run_on_ranks(2, count_step, CASES[name]):
        assert rank.differing() == set(), rank.rank


def test_large_models_are_cut_into_buckets_of_megatrons_own_size() -> None:
    held = [Weight("", 1_000_000)] * 100
    overlap = layout(overlap_grad_reduce=True)
    assert gradient_buffer(held, overlap, 2, is_limited=False).buckets == [100_000_000]
    assert gradient_buffer(held, overlap, 2, is_limited=True).buckets == [40_000_000, 40_000_000, 20_000_000]
    # A million a replica where they are many; the last bucket is padded to a multiple of 128 and of 48.
    assert gradient_buffer(held, overlap, 48, is_limited=True).buckets == [48_000_000, 48_000_000, 4_000_128]
