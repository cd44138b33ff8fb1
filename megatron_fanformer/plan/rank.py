"""A training step of one rank of a world of any size, in this process, beside the formulas of planning.

The local layers run on tensors without content: shapes, memory and communication are a real rank's, numbers are not.
`take_steps` is what a rank does, simulated or real.
"""

import dataclasses
import functools
from collections.abc import Generator
from dataclasses import dataclass

import torch

from megatron_fanformer.data.batches import shared_batches
from megatron_fanformer.model.build import build_stages
from megatron_fanformer.ops.matrices import adds_to_wider
from megatron_fanformer.plan.communication import CommunicationLine, Total, communication, totals
from megatron_fanformer.plan.fake_world import fake_world
from megatron_fanformer.plan.job import Job
from megatron_fanformer.plan.memory import rank_memory
from megatron_fanformer.plan.memory_tracker import MemoryTracker
from megatron_fanformer.runtime.collectives import CollectiveCount, count_collectives
from megatron_fanformer.runtime.parallel import RankGrid, rank_grid
from megatron_fanformer.runtime.seeding import seed_everything
from megatron_fanformer.train.config import RunConfig
from megatron_fanformer.train.machine_choices import choose_for_machine
from megatron_fanformer.train.optimizer import build_optimizer
from megatron_fanformer.train.schedule import build_scheduler
from megatron_fanformer.train.step import train_step, wrap_stages

PEAK_TOLERANCE = 0.04
"""Tolerance of the memory formula, relative to the peak."""


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

    @property
    def formula_peak_bytes(self) -> int:
        """Return the peak by formula."""
        return rank_memory(self.job, self.stage).total_bytes

    @property
    def formula_lines(self) -> list[CommunicationLine]:
        """Return the collectives by formula; a stage's ranks follow on one another."""
        return communication(self.job, self.stage, self.rank % (self.job.world_size // self.job.stages))

    def communication_differences(self) -> list[str]:
        """Return a line for each kind of collective and group for which the formula has another number or bytes."""
        formula, counted = totals(self.formula_lines), totals(self.collectives)
        return [
            f"{self._where}: {group} {kind}: counted {_describe(counted.get((group, kind)))}, by formula "
            f"{_describe(formula.get((group, kind)))}"
            for group, kind in sorted(formula.keys() | counted.keys())
            if formula.get((group, kind)) != counted.get((group, kind))
        ]

    def peak_differences(self) -> list[str]:
        """Return one line if the memory formula's peak is off by more than `PEAK_TOLERANCE`."""
        error = self.formula_peak_bytes / self.peak_bytes - 1
        if abs(error) <= PEAK_TOLERANCE:
            return []
        return [
            f"{self._where}: memory: counted a peak of {self.peak_bytes:,} bytes, by formula "
            f"{self.formula_peak_bytes:,}, {error:+.1%}; at most {PEAK_TOLERANCE:.0%} is allowed"
        ]

    def differences(self) -> list[str]:
        """Return both."""
        return self.communication_differences() + self.peak_differences()

    @property
    def _where(self) -> str:
        return f"stage {self.stage} (rank {self.rank} of {self.job.world_size})"


def _describe(total: Total | None) -> str:
    calls, message_bytes = total or Total(0, 0)
    return f"{calls:,} calls of {message_bytes:,} bytes"


def run_rank(config: RunConfig, *, world_size: int, rank: int, backend: str = "nccl") -> SimulatedRank:
    """Run one rank of a world: build it, take a short step, and a whole one.

    Args:
        backend: what the ranks of that world communicate over; some of megatron-core's settings follow from it.
    """
    torch.set_num_threads(config.runtime.threads_per_rank or 1)  # the loss head takes as many logits as they can cache
    adds_to_wider(torch.float32, torch.bfloat16, torch.device("cpu"))  # called while there are numbers to try it on
    tracker = MemoryTracker()
    with fake_world(world_size, rank), tracker, rank_grid(config.parallel, "cpu") as real:
        grid = dataclasses.replace(real, backend=backend)
        job, collectives = take_steps(config, grid, tracker=tracker)
        return SimulatedRank(
            rank=rank,
            stage=grid.groups.pp.rank(),
            job=job,
            peak_bytes=tracker.peak_bytes,
            held_bytes=tracker.held_bytes,
            collectives=collectives,
        )


def take_steps(
    config: RunConfig,
    grid: RankGrid,
    *,
    seed: int | None = None,
    tracker: MemoryTracker | None = None,
    short_steps: int = 1,
) -> tuple[Job, list[CollectiveCount]]:
    """Build this rank's stage as the trainer does, take short steps, and a whole one.

    Args:
        seed: of the initial weights; None draws none, where they have no content.
        tracker: what is to have the peak of the steps alone.
        short_steps: of a few micro batches. One makes memory and communication of the next those of any later step: it
            makes the optimizer's moments, and megatron-core 0.19 has one more all-reduce in a run's first.

    Returns:
        What was run, and what the collectives of the last step add up to.
    """
    if config.precision.dtype == "auto":  # every supported GPU has bf16
        config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, dtype="bf16"))
    config, _ = choose_for_machine(config, grid)
    # Attention is over whole samples: simulated tensors hold no numbers, and so no bounds of documents.
    job = dataclasses.replace(config.job(grid.data_parallel_size, layers="local", on_cpu=True), has_document_ids=False)
    seed_everything(config.training.seed)
    stages = build_stages(
        config.model,
        config.parallel,
        grid,
        dtype=config.dtype(grid.device),
        seed=seed,
        kernels=config.kernels,
        z_loss_coefficient=config.training.z_loss_coefficient,
    )
    wrapped = wrap_stages(stages, config.parallel, grad_reduce_in_fp32=config.precision.grad_reduce_in_fp32)
    optimizer = build_optimizer(config.optimizer, wrapped)
    scheduler = build_scheduler(config.schedule, optimizer, config.optimizer, train_iters=config.training.steps)
    batches = shared_batches(
        functools.partial(_repeated, job.micro_batch_size, job.model.seq_length),
        grid.samples_group,
        micro_batch_size=job.micro_batch_size,
        seq_length=job.model.seq_length,
        is_used=grid.takes_samples(has_document_ids=False),
    )
    fewest = min(job.num_micro_batches, config.parallel.pipeline_model_parallel_size)
    if tracker is not None:
        tracker.forget_peak()
    for number in (*[fewest] * short_steps, job.num_micro_batches):
        scheduler.step(1)
        with count_collectives(grid) as counts:
            train_step(wrapped, optimizer, batches, grid, number)
    return job, counts.lines()


def _repeated(*size: int) -> Generator[dict[str, torch.Tensor], None, None]:
    while True:
        tokens = torch.zeros(size, dtype=torch.int64)
        positions = torch.arange(size[1]).expand(size)
        yield {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(size), "position_ids": positions}
