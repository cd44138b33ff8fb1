"""A training step of one rank of a world, run in a process of its own.

`rank.simulate_ranks` starts that process. `take_steps` is what a rank does, simulated or real.
"""

import dataclasses
import functools
import time
from collections.abc import Generator
from dataclasses import dataclass

import torch

from megatron_fanformer.data.shared_batches import shared_batches
from megatron_fanformer.model.build import build_stages
from megatron_fanformer.ops.products import adds_to_wider
from megatron_fanformer.planning.job import Job
from megatron_fanformer.runtime.collectives import CollectiveCount, count_collectives
from megatron_fanformer.runtime.parallel import RankGrid, rank_grid
from megatron_fanformer.runtime.pipeline import Batches
from megatron_fanformer.runtime.seeding import seed_everything
from megatron_fanformer.simulation.fake_world import fake_world
from megatron_fanformer.simulation.memory_tracker import MemoryTracker
from megatron_fanformer.training.config import RunConfig
from megatron_fanformer.training.machine_choices import choose_for_machine
from megatron_fanformer.training.optimizer import build_optimizer
from megatron_fanformer.training.schedule import build_scheduler
from megatron_fanformer.training.step import train_step, wrap_stages

SHORT_STEPS = 1
"""Steps of a few micro batches before the measured one, whose memory and communication are then those of any later
step: the first update makes the optimizer's moments, and megatron-core 0.19 has one more all-reduce in a run's first
step."""


@dataclass(frozen=True, kw_only=True)
class SimulatedRank:
    """The counts of one rank's training step."""

    rank: int
    stage: int
    """Number of its pipeline stage."""
    job: Job
    """The job that it ran, every open field resolved: the input of the formulas to compare with."""
    peak_bytes: int
    """The most that live tensors take in a step. (A CPU's building takes more in places: it makes a weight whole, in
    float32, before it keeps a shard.)"""
    held_bytes: int
    """What they take between steps: weights, gradients, the optimizer's state, and a micro batch's samples."""
    collectives: list[CollectiveCount]
    """Collectives of the last step, by group and kind."""
    seconds: float
    """Time that the simulation took."""


def run_rank(config: RunConfig, *, world_size: int, rank: int, backend: str = "nccl") -> SimulatedRank:
    """Run one rank of a world: build it, take a short step, and a whole one.

    Args:
        backend: what the ranks of that world communicate over; some of megatron-core's settings follow from it.
    """
    started = time.monotonic()
    torch.set_num_threads(config.runtime.threads_per_rank or 1)  # the loss head takes as many logits as they can cache
    adds_to_wider(torch.float32, torch.bfloat16, torch.device("cpu"))  # called while there are numbers to try it on
    tracker = MemoryTracker()
    with fake_world(world_size, rank), tracker, rank_grid(config.parallel, "cpu") as own:
        grid = dataclasses.replace(own, backend=backend)
        job, collectives = take_steps(config, grid, tracker=tracker)
        return SimulatedRank(
            rank=rank,
            stage=grid.groups.pp.rank(),
            job=job,
            peak_bytes=tracker.peak_bytes,
            held_bytes=tracker.held_bytes,
            collectives=collectives,
            seconds=time.monotonic() - started,
        )


def take_steps(
    config: RunConfig, grid: RankGrid, *, seed: int | None = None, tracker: MemoryTracker | None = None
) -> tuple[Job, list[CollectiveCount]]:
    """Build this rank's stage as the trainer does, take a short step, and a whole one.

    Args:
        seed: of the initial weights; None draws none, where they have no content.
        tracker: what is to have the peak of the steps alone.

    Returns:
        What was run, and what the collectives of the last step add up to.
    """
    config, job = _resolved(config, grid)
    dtype = config.dtype(grid.device)
    seed_everything(config.training.seed)
    z_loss, kernels = config.training.z_loss_coefficient, config.kernels
    stages = build_stages(
        config.model, config.parallel, grid, dtype=dtype, seed=seed, kernels=kernels, z_loss_coefficient=z_loss
    )
    wrapped = wrap_stages(stages, config.parallel, grad_reduce_in_fp32=config.precision.grad_reduce_in_fp32)
    optimizer = build_optimizer(config.optimizer, wrapped)
    scheduler = build_scheduler(config.schedule, optimizer, config.optimizer, train_iters=config.training.steps)
    batches = _batches(job, grid)
    fewest = min(job.num_micro_batches, config.parallel.pipeline_model_parallel_size)
    if tracker is not None:
        tracker.forget_peak()
    for number in (*[fewest] * SHORT_STEPS, job.num_micro_batches):
        scheduler.step(1)
        with count_collectives(grid) as counts:
            train_step(wrapped, optimizer, batches, grid, number)
    return job, counts.lines()


def _resolved(config: RunConfig, grid: RankGrid) -> tuple[RunConfig, Job]:
    """Return the configuration without open fields, and the same as a job.

    Attention is over whole samples: simulated tensors hold no numbers, and so no bounds of documents.
    """
    if config.precision.dtype == "auto":  # every supported GPU has bf16
        config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, dtype="bf16"))
    config, _ = choose_for_machine(config, grid)
    job = config.job(grid.data_parallel_size, layers="local", on_cpu=True)
    return config, dataclasses.replace(job, has_document_ids=False)


def _batches(job: Job, grid: RankGrid) -> Batches:
    """Return micro batches of one token over and over, shared among ranks as the loader's are."""
    size, length = job.micro_batch_size, job.model.seq_length
    return shared_batches(
        functools.partial(_repeated, size, length),
        grid.samples_group,
        micro_batch_size=size,
        seq_length=length,
        is_used=grid.takes_samples(has_document_ids=False),
    )


def _repeated(*size: int) -> Generator[dict[str, torch.Tensor], None, None]:
    while True:
        tokens = torch.zeros(size, dtype=torch.int64)
        positions = torch.arange(size[1]).expand(size)
        yield {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(size), "position_ids": positions}
