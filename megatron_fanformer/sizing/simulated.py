"""Runs steps of single ranks of a layout on tensors without content, as the local layers do."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_fanformer.errors import InputError
from megatron_fanformer.runtime import device, megatron_cpu
from megatron_fanformer.sizing.estimate import Estimate
from megatron_fanformer.sizing.verb import ALL_STAGES
from megatron_fanformer.training.config import RunConfig

if TYPE_CHECKING:
    from megatron_fanformer.simulation.rank import SimulatedRank


def simulate(estimate: Estimate, ranks: Sequence[int | str]) -> "Iterator[SimulatedRank]":
    """Run those ranks of a layout, or one of each of its stages, one after the other in this process.

    Raises:
        InputError: `train` refuses the layout with local layers.
    """
    world_size, replicas = estimate.job.world_size, estimate.job.data_parallel_size
    config = as_simulated(estimate.config, replicas)
    if found := config.section_problems(leaving=["data"]) or config.joint_problems(replicas):
        raise InputError("\n".join(found))
    device.hide_gpus()
    device.quieten_libraries()
    megatron_cpu.install()
    from megatron_fanformer.simulation.rank import run_rank

    numbers = [rank for rank in ranks if isinstance(rank, int)]
    if ALL_STAGES in ranks:
        numbers = first_rank_of_each_stage(world_size, estimate.job.stages)
    for rank in numbers:
        yield run_rank(config, world_size=world_size, rank=rank)


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
