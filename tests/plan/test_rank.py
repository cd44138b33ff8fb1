"""Which ranks stand for a world, and how many micro batches for a step."""

import dataclasses

import pytest

from megatron_fanformer.plan.rank import run_rank
from megatron_fanformer.plan.ranks import as_simulated
from tests.plan.runs import run_config

PP = dict(pipeline_model_parallel_size=2)
INTERLEAVED = run_config(dict(num_layers=4), **PP, virtual_pipeline_model_parallel_size=2, samples=64)
SAMPLE_BYTES = 8 + 4  # a token, which is its label, too, and its place in the loss mask
POSITION_BYTES = 8


@pytest.mark.full
def test_few_micro_batches_stand_for_many() -> None:
    """The peak is the same but for the samples, and communication is linear in their number, as the formula is."""
    few, many = (run_rank(config, world_size=8, rank=0) for config in (as_simulated(INTERLEAVED, 4), INTERLEAVED))
    assert (few.job.num_micro_batches, many.job.num_micro_batches) == (4, 8)
    assert few.communication_differences() == many.communication_differences() == []
    tokens, samples = INTERLEAVED.model.seq_length, INTERLEAVED.training.micro_batch_size
    assert many.peak_bytes - few.peak_bytes == 4 * tokens * (samples * SAMPLE_BYTES + POSITION_BYTES)


def test_stages_of_the_data_do_not_stand_in_the_way() -> None:
    """With fewer samples a step they would begin after the last one."""
    data = dataclasses.replace(INTERLEAVED.data, stages={"from token 12K": ["more"]})  # step 7 of 10
    assert as_simulated(dataclasses.replace(INTERLEAVED, data=data), 4).joint_problems(4) == []


def test_ranks_of_a_stage_own_different_matrices() -> None:
    """With Muon: what each sends depends on its number among the stage's ranks."""
    config = run_config(tensor_model_parallel_size=2, **PP, optimizer=dict(name="muon"))
    ranks = [run_rank(config, world_size=8, rank=rank) for rank in (4, 7)]
    moved = [sum(line.message_bytes for line in rank.collectives) for rank in ranks]
    assert moved[0] != moved[1]
    assert [rank.communication_differences() for rank in ranks] == [[], []]
