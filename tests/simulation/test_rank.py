"""Which ranks stand for a world, how many micro batches for a step, and what is refused."""

import dataclasses
from typing import Any

import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import PrecisionConfig
from megatron_fanformer.simulation.fake_rank import run_rank
from megatron_fanformer.simulation.rank import (
    check,
    first_rank_of_each_stage,
    simulate_ranks,
    with_few_micro_batches,
)
from megatron_fanformer.sizing.simulated import communication_differences
from tests.simulation.runs import run_config

PP = dict(pipeline_model_parallel_size=2)
VPP = dict(**PP, virtual_pipeline_model_parallel_size=2)
INTERLEAVED = run_config(dict(num_layers=4), **VPP, samples=64)  # 8 micro batches of 4 replicas
SAMPLE_BYTES = 8 + 4  # a token, which is its label, too, and its place in the loss mask
POSITION_BYTES = 8


@pytest.mark.full
def test_few_micro_batches_stand_for_many() -> None:
    """The peak is the same but for the samples, and communication is linear in their number, as the formula is."""
    few, many = (
        run_rank(config, world_size=8, rank=0) for config in (with_few_micro_batches(INTERLEAVED, 8), INTERLEAVED)
    )
    assert (few.job.num_micro_batches, many.job.num_micro_batches) == (4, 8)
    assert communication_differences(few) == communication_differences(many) == []
    tokens, samples = INTERLEAVED.model.seq_length, INTERLEAVED.training.micro_batch_size
    assert many.peak_bytes - few.peak_bytes == 4 * tokens * (samples * SAMPLE_BYTES + POSITION_BYTES)


def test_a_batch_that_is_small_already_stays() -> None:
    assert with_few_micro_batches(run_config(samples=2), 1) == run_config(samples=2)


def test_stages_of_the_data_do_not_stand_in_the_way() -> None:
    """With fewer samples a step they would begin after the last one."""
    data = dataclasses.replace(INTERLEAVED.data, stages={"from token 12K": ["more"]})  # step 7 of 10
    config = dataclasses.replace(INTERLEAVED, data=data)
    assert config.joint_problems(4) == []
    check(with_few_micro_batches(config, 8), world_size=8, ranks=[0])


def test_ranks_of_a_stage_own_different_matrices() -> None:
    """With Muon: what each sends depends on its number among the stage's ranks."""
    config = run_config(tensor_model_parallel_size=2, **PP, optimizer=dict(name="muon"))
    found = [run_rank(config, world_size=8, rank=rank) for rank in (4, 7)]
    moved = [sum(line.message_bytes for line in each.collectives) for each in found]
    assert moved[0] != moved[1]
    assert [communication_differences(each) for each in found] == [[], []]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Transformer Engine": (
        dict(kernels=dict(transformer_impl="transformer_engine")),
        "kernels.transformer_impl is for GPUs alone, and cannot be simulated; set it to local",
    ),
    "CUDA graphs": (
        dict(kernels=dict(cuda_graph_impl="local")),
        "kernels.cuda_graph_impl is for GPUs alone, and cannot be simulated; set it to none",
    ),
    "a layout": (dict(tensor_model_parallel_size=8), "8 does not divide model.num_attention_heads 4"),
    "a batch": (dict(samples=6), "training.global_batch_size 6 is not a multiple of"),
    "a world": (dict(tensor_model_parallel_size=2, context_parallel_size=8), "the world size is 8, not a multiple of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    fields, line = REFUSED[name]
    with pytest.raises(InputError, match=line):
        check(run_config(**fields), world_size=8, ranks=[0])


def test_fp8_is_refused() -> None:
    config = dataclasses.replace(run_config(), precision=PrecisionConfig(dtype="bf16", fp8="hybrid"))
    with pytest.raises(InputError, match=r"^precision.fp8 is for GPUs alone, and cannot be simulated; set it to null$"):
        check(config, world_size=1, ranks=[0])


def test_a_rank_beyond_the_world_is_refused() -> None:
    with pytest.raises(InputError, match=r"^rank 4 is not in a world of 4; choose one from 0 to 3$"):
        check(run_config(), world_size=4, ranks=[0, 4])


@pytest.mark.full
def test_ranks_run_in_processes_of_their_own() -> None:
    """Two in the same process, one after the other, like two in two."""
    config = run_config(dict(num_layers=3), **PP, samples=64, num_layers_in_last_pipeline_stage=1)
    ranks = [*first_rank_of_each_stage(config.parallel, 64), 63]
    simulated = simulate_ranks(config, world_size=64, ranks=ranks)
    assert [(rank.rank, rank.stage) for rank in simulated] == [(0, 0), (32, 1), (63, 1)]
    for one in simulated:
        here = run_rank(config, world_size=64, rank=one.rank)
        assert dataclasses.replace(here, seconds=one.seconds) == one
    assert simulated[1].peak_bytes == simulated[2].peak_bytes < simulated[0].peak_bytes
