"""A training step of one rank of a world of any size, in this process, to compare with the formulas.

The local layers run on tensors without content: shapes, memory and communication are a real rank's, numbers are not.
`fake_world` replaces the parts of torch and megatron-core that stand in the way of the trainer's own code there: a
closed list, each with its reason, undone at the end of the block. Checked on megatron-core 0.16.1 and 0.19.2.
"""

import dataclasses
import functools
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fanformer.data.batches import shared_batches
from megatron_fanformer.errors import InputError
from megatron_fanformer.model.build import build_stages
from megatron_fanformer.ops.matrices import adds_to_wider
from megatron_fanformer.plan.communication import CommunicationLine, Total, communication, totals
from megatron_fanformer.plan.job import Job
from megatron_fanformer.plan.memory import rank_memory
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
INVENTED = 1
"""Value of a tensor without content where the program reads one: a loss, a gradient norm. It only decides whether to go
on."""


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
    """Bytes between steps: weights, gradients, the optimizer's state, and a micro batch's samples."""
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
        nothing = Total(0, 0)
        return [
            f"{self._where}: {group} {kind}: counted {_describe(counted.get((group, kind), nothing))}, by formula "
            f"{_describe(formula.get((group, kind), nothing))}"
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
        """Return the differences of communication and peak."""
        return self.communication_differences() + self.peak_differences()

    @property
    def _where(self) -> str:
        return f"stage {self.stage} (rank {self.rank} of {self.job.world_size})"


def _describe(total: Total) -> str:
    return f"{total.calls:,} calls of {total.message_bytes:,} bytes"


def simulate(config: RunConfig, job: Job, ranks: Sequence[int]) -> Iterator[SimulatedRank]:
    """Run those ranks of a layout one after the other; none: one of each pipeline stage.

    Raises:
        InputError: `train` refuses the layout with local layers.
    """
    config = as_simulated(config, job.data_parallel_size)
    if problems := config.section_problems(leaving=["data"]) or config.joint_problems(job.data_parallel_size):
        raise InputError("\n".join(problems))
    for rank in ranks or first_rank_of_each_stage(job.world_size, job.stages):
        yield run_rank(config, world_size=job.world_size, rank=rank)


def first_rank_of_each_stage(world_size: int, stages: int) -> list[int]:
    """Return one rank of every pipeline stage, by the rank grid of `runtime.parallel`; all ranks of a stage do alike,
    but for the matrices that each owns with Muon.
    """
    return [stage * (world_size // stages) for stage in range(stages)]


def as_simulated(config: RunConfig, replicas: int) -> RunConfig:
    """Return the configuration with local layers, which alone can be simulated, and at most two micro batches a stage.

    More change the peak by their samples alone, since a stage never holds more activations at once; and communication
    is linear in their number. The data's mixes, which begin at steps of the whole batch, concern neither.
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


def run_rank(config: RunConfig, *, world_size: int, rank: int, backend: str = "nccl") -> SimulatedRank:
    """Run one rank of a world: build it, take a short step, and a whole one.

    Args:
        backend: of that world's communication; some of megatron-core's settings follow from it.
    """
    torch.set_num_threads(config.runtime.threads_per_rank or 1)  # the loss head takes as many logits as they can cache
    adds_to_wider(torch.float32, torch.bfloat16, torch.device("cpu"))  # called while there are numbers to try it on
    tracker = MemoryTracker()
    with fake_world(world_size, rank), tracker, rank_grid(config.parallel, "cpu") as gloo_grid:
        grid = dataclasses.replace(gloo_grid, backend=backend)
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
    tracker: "MemoryTracker | None" = None,
    short_steps: int = 1,
) -> tuple[Job, list[CollectiveCount]]:
    """Build this rank's stage as the trainer does, take short steps, and a whole one.

    Args:
        seed: of the initial weights; None draws none, where they have no content.
        tracker: tracks the peak of the steps alone.
        short_steps: of a few micro batches. One makes memory and communication of the next those of any later step: it
            makes the optimizer's moments, and megatron-core 0.19 has one more all-reduce in a run's first.

    Returns:
        The job, and the sums of the last step's collectives.
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


# -- the world


class ContentlessTensors(FakeTensorMode):
    """Torch's fake tensors, for a program that communicates and reads an occasional number."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # the states of random generators are real

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation on shapes alone."""
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
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with _patched(rank), ContentlessTensors():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _patched(rank: int) -> Iterator[None]:
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.optimizer import clip_grads

    with (
        # Every rank of a world makes all of its groups, tens of thousands of them; of those of others it keeps nothing.
        # megatron-core asks for some over gloo, which would look for its ranks.
        mock.patch.object(dist, "new_group", _groups_of_rank(rank, dist.new_group)),
        # The optimizer asks all ranks which kinds of parameters they have, to have a group for each of them. A stage
        # has a layer at least, and so weights of every kind.
        mock.patch.object(dist, "all_gather_object", _answer_for_all),
        # Recomputation copies an output into the storage that it had: there is nothing to copy, and the copy of a
        # storage without content leaks.
        mock.patch.object(torch.UntypedStorage, "copy_", lambda storage, *_: storage),
        # It makes a tensor of a list of norms by reading each, past the fake tensors' answer for one without content.
        mock.patch.object(clip_grads, "l2_norm_impl", _l2_norm),
        # It makes the shards of all replicas to take one: at a thousand replicas, most of the time of a simulation.
        mock.patch.object(param_and_grad_buffer, "shard_buffer", _Shards),
    ):
        yield


def _groups_of_rank(rank: int, new_group: Any) -> Any:
    def group_of_rank(ranks: list[int] | None = None, **options: Any) -> Any:
        if ranks is not None and rank not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER
        return new_group(ranks, **{**options, "backend": "fake", "pg_options": None})

    return group_of_rank


def _answer_for_all(answers: list[Any], answer: Any, group: Any = None) -> None:
    answers[:] = [answer] * len(answers)


def _l2_norm(_chunk_size: int, _overflow: Any, tensor_lists: Any, _per_tensor: bool) -> tuple[torch.Tensor, None]:
    norms = torch.stack([torch.norm(tensor) for tensors in tensor_lists for tensor in tensors])
    return torch.norm(norms).reshape(1).float(), None


class _Shards:
    """The equal shards of a buffer, each made on first use."""

    def __init__(self, buffer: torch.Tensor, number: int) -> None:
        self._buffer, self._size = buffer, buffer.numel() // number

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._buffer[index * self._size : (index + 1) * self._size]


# -- memory


class MemoryTracker(TorchDispatchMode):
    """Tracks, while entered, the bytes of all live tensors, real or fake, that operations return.

    Storages are counted: views share one, and one that is resized counts with its new size. Memory that a kernel
    allocates for itself while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held_bytes = 0
        """Bytes of the storages that are alive."""
        self.peak_bytes = 0
        """The largest value of `held_bytes` so far."""
        self._sizes: dict[int, int] = {}  # by the storage's address in C++
        self._references: dict[int, Any] = {}

    def forget_peak(self) -> None:
        """Begin a new peak, at the bytes held now."""
        self.peak_bytes = self.held_bytes

    def __enter__(self) -> Any:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resizing(self._resize)  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and track its results."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        before = self._sizes.get(address)
        if before is None:
            self._references[address] = weakref.ref(storage, lambda _: self._forget(address))
        if before != size:
            self._sizes[address] = size
            self.held_bytes += size - (before or 0)
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _forget(self, address: int) -> None:
        self.held_bytes -= self._sizes.pop(address)
        del self._references[address]

    def _resizing(self, resize: Any) -> Any:
        """Return torch's method, which no dispatch mode sees, with a note of the new size."""

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._note(storage)
            return result

        return resize_and_note
