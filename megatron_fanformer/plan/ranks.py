"""Runs steps of single ranks of a layout on tensors without content, as the local layers do."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_fanformer.errors import InputError
from megatron_fanformer.plan.job import Job
from megatron_fanformer.runtime import device, megatron_cpu
from megatron_fanformer.train.config import RunConfig

if TYPE_CHECKING:  # imports torch, which takes seconds
    from megatron_fanformer.plan.rank import SimulatedRank


def simulate(config: RunConfig, job: Job, ranks: Sequence[int]) -> "Iterator[SimulatedRank]":
    """Run those ranks of a layout one after the other in this process; none: one of each pipeline stage.

    Raises:
        InputError: `train` refuses the layout with local layers.
    """
    config = as_simulated(config, job.data_parallel_size)
    if found := config.section_problems(leaving=["data"]) or config.joint_problems(job.data_parallel_size):
        raise InputError("\n".join(found))
    device.hide_gpus()
    device.quieten_libraries()
    megatron_cpu.install()
    from megatron_fanformer.plan.rank import run_rank

    for rank in ranks or first_rank_of_each_stage(job.world_size, job.stages):
        yield run_rank(config, world_size=job.world_size, rank=rank)


def first_rank_of_each_stage(world_size: int, stages: int) -> list[int]:
    """Return one rank of every pipeline stage, by the rank grid of `runtime.parallel`; all ranks of a stage do alike,
    but for the matrices that each owns with Muon.
    """
    return [stage * (world_size // stages) for stage in range(stages)]


def as_simulated(config: RunConfig, replicas: int) -> RunConfig:
    """Return the configuration with local layers, the only ones that can be simulated, and at most two micro batches a
    stage.

    More change the peak by their samples alone, since a stage never holds more activations at once; and communication
    is linear in their number. The data's stages, which begin at steps of the whole batch, concern neither.
    """
    training, parallel = config.training, config.parallel
    few = min(config.num_micro_batches(replicas), 2 * parallel.pipeline_model_parallel_size)
    samples = few * training.micro_batch_size * replicas
    return dataclasses.replace(
        config,
        kernels=dataclasses.replace(
            config.kernels,
            transformer_impl="local",
            gradient_accumulation_fusion=None,
            cuda_graph_impl="none",
            fused_single_qkv_rope=False,
        ),
        parallel=dataclasses.replace(parallel, cp_comm_type="a2a" if parallel.exchanges_heads else None),
        precision=dataclasses.replace(config.precision, fp8=None, fp8_fan=False, first_last_layers_bf16=False),
        runtime=dataclasses.replace(config.runtime, device="auto"),
        training=dataclasses.replace(training, global_batch_size=samples),
        data=dataclasses.replace(config.data, stages={}),
    )
