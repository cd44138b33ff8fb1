"""Simulates ranks of a world of any size on one machine: in processes of their own, without a GPU or other ranks.

What is simulated are the local layers, on tensors without content: shapes, memory and communication are a real rank's,
numbers are not. A rank's process takes less than a gigabyte.
"""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TYPE_CHECKING

from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.processes import end_with_owner
from megatron_fanformer.runtime.device import quieten_libraries
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.training.config import RunConfig

if TYPE_CHECKING:  # imports torch, which takes seconds
    from megatron_fanformer.simulation.fake_rank import SimulatedRank


def simulate_ranks(
    config: RunConfig, *, world_size: int, ranks: Sequence[int], processes: int = 1
) -> "list[SimulatedRank]":
    """Simulate ranks of a world for a training step, as the trainer runs it: what each holds and communicates.

    Fields that are left to the machine are as on GPUs over NCCL: bf16, communication overlapped.

    Args:
        processes: how many ranks at a time.

    Returns:
        What was seen of each, in the order of `ranks`.

    Raises:
        InputError: the configuration is wrong for that world, or asks for what is not simulated.
        FanformerError: a rank's process died.
    """
    check(config, world_size=world_size, ranks=ranks)
    quieten_libraries()  # this process, too, imports them, with what the others return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_prepare_process) as pool:
        futures = [pool.submit(_run_rank, config, world_size, rank) for rank in ranks]
        try:
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise FanformerError(
                "the process of a simulated rank died; if memory ran out, simulate fewer at a time"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def first_rank_of_each_stage(parallel: ParallelConfig, world_size: int) -> list[int]:
    """Return one rank of every pipeline stage, by the rank grid of `runtime.parallel`; all ranks of a stage do alike,
    but for the matrices that each owns with Muon.
    """
    stages = parallel.pipeline_model_parallel_size
    return [stage * (world_size // stages) for stage in range(stages)]


def with_few_micro_batches(config: RunConfig, world_size: int) -> RunConfig:
    """Return the same run with a global batch so small that it takes little time to simulate.

    At most two micro batches a stage. More change the peak by their samples alone, since a stage never holds more
    activations at once; and communication is linear in their number: a formula that is right for these is right for
    all.

    Without the data's stages, which begin at steps of the whole batch and concern neither.
    """
    replicas = config.parallel.resolve_data_parallel_size(world_size)
    few = min(config.num_micro_batches(replicas), 2 * config.parallel.pipeline_model_parallel_size)
    samples = few * config.training.micro_batch_size * replicas
    training = dataclasses.replace(config.training, global_batch_size=samples)
    return dataclasses.replace(config, training=training, data=dataclasses.replace(config.data, stages={}))


def check(config: RunConfig, *, world_size: int, ranks: Sequence[int]) -> None:
    """Refuse what cannot be simulated.

    Raises:
        InputError: one line for each reason.
    """
    found = problems(config, config.parallel.resolve_data_parallel_size(world_size))
    found += [
        f"rank {rank} is not in a world of {world_size}; choose one from 0 to {world_size - 1}"
        for rank in ranks
        if not 0 <= rank < world_size
    ]
    if found:
        raise InputError("\n".join(found))


def problems(config: RunConfig, data_parallel_size: int) -> list[str]:
    """Return why a layout cannot be simulated, one line each: what is for GPUs alone, or else `train`'s own rules.

    The run's data and folder need not be there.
    """
    kernels = config.kernels
    for_gpus = {
        "kernels.transformer_impl": (kernels.transformer_impl == "transformer_engine", "local"),
        "kernels.cuda_graph_impl": (kernels.cuda_graph_impl != "none", "none"),
        "precision.fp8": (config.precision.fp8 is not None, "null"),
    }
    refused = [
        f"{name} is for GPUs alone, and cannot be simulated; set it to {remedy}"
        for name, (is_requested, remedy) in for_gpus.items()
        if is_requested
    ]
    return refused or config.section_problems(leaving=["data"]) or config.joint_problems(data_parallel_size)


def _prepare_process() -> None:
    end_with_owner()
    from megatron_fanformer.runtime import device, megatron_cpu

    device.hide_gpus()
    device.quieten_libraries()
    megatron_cpu.install()


def _run_rank(config: RunConfig, world_size: int, rank: int) -> "SimulatedRank":
    from megatron_fanformer.simulation.fake_rank import run_rank

    return run_rank(config, world_size=world_size, rank=rank)
