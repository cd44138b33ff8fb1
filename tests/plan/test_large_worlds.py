"""The formula of communication against the count of it, in worlds of many ranks, one rank of every stage."""

from megatron_fanformer.plan.rank import run_rank
from megatron_fanformer.plan.ranks import first_rank_of_each_stage
from megatron_fanformer.train.config import RunConfig
from tests.plan.runs import run_config


def differences(config: RunConfig, world_size: int) -> list[str]:
    ranks = first_rank_of_each_stage(world_size, config.parallel.pipeline_model_parallel_size)
    simulated = (run_rank(config, world_size=world_size, rank=rank) for rank in ranks)
    return [line for rank in simulated for line in rank.communication_differences()]


def test_a_world_of_1024_ranks() -> None:
    """Everything at once, in one layout: the ends of a pipeline, and a shape that no padding fits by itself."""
    config = run_config(
        dict(num_layers=4, num_query_groups=2),
        samples=1024,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        ddp_bucket_size=6000,
        recompute_granularity="selective",
        recompute_modules=["core_attn", "mlp"],
    )
    assert differences(config, 1024) == []
