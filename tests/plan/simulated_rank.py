"""A training step of one rank of a world of any size, in this process, to compare with the formulas of `plan`.

The local layers run on torch's fake tensors: shapes, memory and communication are a real rank's, numbers are not.
`fake_world` replaces the parts of torch and megatron-core that stand in the way of the trainer's own code there: a
closed list, each with its reason, undone at the end of the block. Checked on megatron-core 0.16.1 and 0.19.2.
"""

import dataclasses
import functools
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fanformer.data.batches import shared_batches
from megatron_fanformer.model.build import build_stages
from megatron_fanformer.ops.matrices import adds_to_wider
from megatron_fanformer.plan.communication import communication
from megatron_fanformer.plan.gradient_buffers import Weight, chunks, weights
from megatron_fanformer.plan.job import Job
from megatron_fanformer.plan.live_tensors import MemoryTracker
from megatron_fanformer.plan.memory import RankMemory, rank_memory
from megatron_fanformer.runtime.parallel import RankGrid, rank_grid
from megatron_fanformer.runtime.seeding import seed_everything
from megatron_fanformer.train.config import RunConfig
from megatron_fanformer.train.machine_choices import choose_for_machine
from megatron_fanformer.train.optimizer import build_optimizer
from megatron_fanformer.train.schedule import build_scheduler
from megatron_fanformer.train.step import train_step, wrap_stages
from tests.plan.counting import CollectiveCount, count_collectives, held_states, held_weights, totals

PEAK_TOLERANCE = 0.04
"""Of the memory formula, relative to the peak."""
INVENTED = 1
"""Value of a tensor without content where the program reads one: a loss, a gradient norm. It only decides whether to go
on."""


class SimulatedRank(NamedTuple):
    """The counts of one rank's training step."""

    rank: int
    stage: int
    job: Job
    """The job that it ran, every open field resolved: the input of the formulas to compare with."""
    peak_bytes: int
    """The most that live tensors take in a step."""
    held_bytes: int
    """Bytes between steps: weights, gradients, the optimizer's state, and a micro batch's samples."""
    collectives: list[CollectiveCount]
    """Collectives of the last step."""
    weights: list[list[Weight]]
    """By chunk."""
    states: dict[str, int]
    """Bytes of weights, gradients, main weights and moments."""

    @property
    def memory(self) -> RankMemory:
        """By formula."""
        return rank_memory(self.job, self.stage)

    def differing(self) -> set[str]:
        """The groups and kinds of collectives for which the formula has another number or other bytes."""
        chunks_here = chunks(self.job.model, self.job.parallel, self.stage)
        assert self.weights == [weights(self.job.model, self.job.parallel, chunk) for chunk in chunks_here]
        sizes = self.job.group_sizes(self.stage)
        assert all(line.ranks == sizes[line.group] for line in self.collectives)
        if self.rank == self.stage * self.job.world_size // self.job.stages:  # parts of the others differ by padding
            assert self.states.items() <= {**dict.fromkeys(self.states, 0), **self.memory.lines}.items()
        # A stage's ranks follow on one another.
        formula = totals(communication(self.job, self.stage, self.rank % (self.job.world_size // self.job.stages)))
        counted = totals(self.collectives)
        return {" ".join(key) for key in formula.keys() | counted.keys() if formula.get(key) != counted.get(key)}


def run_rank(config: RunConfig, *, world_size: int, rank: int, backend: str = "nccl") -> SimulatedRank:
    """Run one rank of a world: build it, take a short step, and a whole one.

    Args:
        backend: of that world's communication; some of megatron-core's settings follow from it.
    """
    torch.set_num_threads(config.runtime.threads_per_rank or 1)  # the loss head takes as many logits as they can cache
    adds_to_wider(torch.float32, torch.bfloat16, torch.device("cpu"))  # called while there are numbers to try it on
    tracker = MemoryTracker()
    with fake_world(world_size, rank), tracker, rank_grid(config.parallel, "cpu") as gloo_grid:
        return take_steps(config, dataclasses.replace(gloo_grid, backend=backend), tracker)


class Dispatched(TorchDispatchMode):
    """Counts collectives in another way: as torch dispatches them, which the count does not rely on."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.namespace == "c10d" and not func._schema.name.startswith("c10d::recv")
        return func(*args, **(kwargs or {}))


def take_steps(config: RunConfig, grid: RankGrid, tracker: MemoryTracker, seed: int | None = None) -> SimulatedRank:
    """Build this rank's stage as the trainer does, take a step of a few micro batches, and a whole one.

    The first makes memory and communication of the next those of any later step: it makes the optimizer's moments, and
    megatron-core 0.19 has one more all-reduce in a run's first.

    Args:
        seed: of the initial weights; None draws none, where they have no content.
    """
    config, _ = choose_for_machine(config, grid)
    job = config.job(grid.data_parallel_size, layers="local", on_cpu=True)
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
        functools.partial(repeated_batch, job),
        grid.samples_group,
        micro_batch_size=job.micro_batch_size,
        seq_length=job.model.seq_length,
        has_document_ids=job.has_document_ids,
        is_used=grid.takes_samples(has_document_ids=job.has_document_ids),
    )
    tracker.peak_bytes = tracker.held_bytes  # of the steps alone: building makes a weight whole before it is cut
    for number in (min(job.num_micro_batches, job.stages), job.num_micro_batches):
        scheduler.step(1)
        with Dispatched() as dispatched, count_collectives(grid) as counts:
            train_step(wrapped, optimizer, batches, grid, number)
        assert counts.calls_seen == dispatched.calls
    return SimulatedRank(
        grid.rank,
        grid.groups.pp.rank(),
        job,
        tracker.peak_bytes,
        tracker.held_bytes,
        counts.lines(),
        [held_weights(chunk, config.parallel.sequence_parallel) for chunk in stages],
        held_states(wrapped, optimizer, job),
    )


def repeated_batch(job: Job) -> Generator[dict[str, torch.Tensor], None, None]:
    size = job.micro_batch_size, job.model.seq_length
    while True:
        tokens = torch.zeros(size, dtype=torch.int64)
        positions = torch.arange(size[1]).expand(size)
        batch = {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(size), "position_ids": positions}
        yield {**batch, "document_ids": (positions // 9).int()} if job.has_document_ids else batch


# -- the world


class ContentlessTensors(FakeTensorMode):
    """Torch's fake tensors, for a program that communicates and reads an occasional number."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # the states of random generators are real

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":  # torch has no fake kernels of the coalesced ones; its own do no more than this
            work = FakeWork().boxed()
            return (args[0], work) if len(func._schema.returns) == 2 else work
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:  # torch itself answers for constants, such as the kind of a mask
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return float(INVENTED) if args[0].dtype.is_floating_point else INVENTED


@contextmanager
def fake_world(world_size: int, rank: int) -> Iterator[None]:
    """Make this process that rank: torch.distributed's default group, and tensors without content from here on."""
    from megatron.core.optimizer import clip_grads
    from torch.testing._internal.distributed.fake_pg import FakeStore

    new_group = dist.new_group

    def group_of_rank(ranks: list[int] | None = None, **options: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return new_group(ranks, **{**options, "backend": "fake", "pg_options": None})

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with (
            # Every rank of a world makes all of its groups, tens of thousands of them; of those of others it keeps
            # nothing. megatron-core asks for some over gloo, which would look for its ranks.
            mock.patch.object(dist, "new_group", group_of_rank),
            # The optimizer asks all ranks which kinds of parameters they have, to have a group for each of them. A
            # stage has a layer at least, and so weights of every kind.
            mock.patch.object(dist, "all_gather_object", answer_for_all),
            # Recomputation copies an output into the storage that it had: there is nothing to copy, and the copy of a
            # storage without content leaks.
            mock.patch.object(torch.UntypedStorage, "copy_", lambda storage, *_: storage),
            # It makes a tensor of a list of norms by reading each, past the fake tensors' answer.
            mock.patch.object(clip_grads, "l2_norm_impl", l2_norm),
            ContentlessTensors(),
        ):
            yield
    finally:
        dist.destroy_process_group()


def answer_for_all(answers: list[Any], answer: Any, group: Any = None) -> None:
    answers[:] = [answer] * len(answers)


def l2_norm(_chunk_size: int, _overflow: Any, tensor_lists: Any, _per_tensor: bool) -> tuple[torch.Tensor, None]:
    norms = torch.stack([torch.norm(tensor) for tensors in tensor_lists for tensor in tensors])
    return torch.norm(norms).reshape(1).float(), None
