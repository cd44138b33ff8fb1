"""Simulated ranks: their world, the tracker of memory, real ranks over gloo to the byte, and planted faults."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.optimizer import clip_grads
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from megatron_fanformer.plan import communication, gradient_buffers, simulation
from megatron_fanformer.plan.simulation import (
    PEAK_TOLERANCE,
    MemoryTracker,
    SimulatedRank,
    as_simulated,
    fake_world,
    first_rank_of_each_stage,
    run_rank,
    take_steps,
)
from megatron_fanformer.runtime.collectives import CollectiveCount
from megatron_fanformer.runtime.parallel import rank_grid
from megatron_fanformer.train import step
from megatron_fanformer.train.config import RunConfig
from tests.plan.runs import run_config

# -- its world


def patched() -> list[object]:
    """What a fake world replaces."""
    return [
        dist.new_group,
        dist.all_gather_object,
        torch.UntypedStorage.copy_,
        clip_grads.l2_norm_impl,
        param_and_grad_buffer.shard_buffer,
    ]


def test_nothing_is_left_of_it_even_after_an_error() -> None:
    before = patched()
    with pytest.raises(KeyError), fake_world(8, 3):
        assert isinstance(torch.zeros(2), FakeTensor)
        assert all(now is not then for now, then in zip(patched(), before, strict=True))
        raise KeyError
    assert patched() == before
    assert not isinstance(torch.zeros(2), FakeTensor)
    assert not dist.is_initialized()


def test_a_rank_is_in_its_own_groups_alone() -> None:
    with fake_world(16384, 700):
        assert (dist.get_rank(), dist.get_world_size()) == (700, 16384)
        own, others = dist.new_group([600, 700, 800], backend="gloo"), dist.new_group([600, 800])
        assert (dist.get_rank(own), dist.get_world_size(own)) == (1, 3)
        assert others is dist.GroupMember.NON_GROUP_MEMBER


def test_the_shard_of_a_rank_is_megatrons() -> None:
    buffer = torch.arange(24)
    shards = param_and_grad_buffer.shard_buffer(buffer, 6)
    with fake_world(6, 0):
        ours = param_and_grad_buffer.shard_buffer
    for number, shard in enumerate(shards):
        assert ours(buffer, 6)[number].tolist() == shard.tolist()


def test_a_number_that_is_read_is_invented_unless_it_is_known() -> None:
    with fake_world(2, 0):
        total = torch.ones(3).sum()
        dist.all_reduce(total)
        assert (total.item(), total.to(torch.int32).item(), bool(total > 5)) == (1.0, 1, True)
        assert torch.tensor([7]).item() == 7


@pytest.mark.full
def test_no_step_holds_more_than_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputation frees storages and fills them again, past what torch's fake tensors follow."""
    config = run_config(
        recompute_granularity="selective",
        recompute_modules=["core_attn", "layernorm", "mlp", "fan"],
        tensor_model_parallel_size=2,
        sequence_parallel=True,
    )
    two_steps = run_rank(config, world_size=4, rank=0)
    monkeypatch.setattr(simulation, "take_steps", functools.partial(take_steps, short_steps=4))
    assert run_rank(config, world_size=4, rank=0) == two_steps


# -- the tracker

KB = 256  # elements of a float32 tensor that takes a KiB


@pytest.fixture(params=["real", "fake"])
def tracker(request: pytest.FixtureRequest) -> MemoryTracker:
    """One that follows real tensors, and one that follows fake ones."""
    if request.param == "fake":
        mode = FakeTensorMode()
        mode.__enter__()
        request.addfinalizer(lambda: mode.__exit__(None, None, None))
    return MemoryTracker()


def test_storages_are_counted_once_and_until_the_last_view_goes(tracker: MemoryTracker) -> None:
    with tracker:
        whole = torch.zeros(4 * KB)
        half = whole[: 2 * KB].view(2, KB)
        half.add_(1)
        assert tracker.held_bytes == 4096
        del whole
        assert tracker.held_bytes == 4096
        del half
        assert (tracker.held_bytes, tracker.peak_bytes) == (0, 4096)


def test_what_autograd_keeps_is_held(tracker: MemoryTracker) -> None:
    with tracker:
        weight = torch.ones(KB, requires_grad=True)
        loss = (weight * 2).exp().sum()  # exp keeps its output
        assert tracker.held_bytes == 1024 + 1024 + 4
        loss.backward()
        del loss
        assert tracker.held_bytes == 1024 + 1024  # the weight and its gradient


def test_a_storage_that_is_resized_counts_with_its_new_size(tracker: MemoryTracker) -> None:
    with tracker:
        tensor = torch.zeros(KB)
        tensor.untyped_storage().resize_(0)
        assert tracker.held_bytes == 0
        tensor.untyped_storage().resize_(2048)
        assert (tracker.held_bytes, tracker.peak_bytes) == (2048, 2048)
        del tensor
        assert tracker.held_bytes == 0


def test_nothing_is_followed_outside_of_the_block(tracker: MemoryTracker) -> None:
    with tracker:
        inside = torch.zeros(KB)
    torch.zeros(KB)
    inside.untyped_storage().resize_(0)
    assert (tracker.held_bytes, tracker.peak_bytes) == (1024, 1024)


# -- against real ranks

RunOnRanks = Callable[..., list[Any]]

TP = dict(tensor_model_parallel_size=2)
SP = dict(**TP, sequence_parallel=True)
PP = dict(pipeline_model_parallel_size=2)
CP = dict(context_parallel_size=2)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
OVERLAP = dict(overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=6000)
DEEP = dict(num_layers=4)


def selective(*modules: str) -> dict[str, Any]:
    return dict(recompute_granularity="selective", recompute_modules=list(modules))


# Of four ranks each.
CONFIGS: dict[str, RunConfig] = {
    "sp, dp, selective": run_config(**SP, **selective("core_attn", "layernorm", "mlp")),
    "vpp, dp, overlap, full": run_config(
        DEEP, **PP, virtual_pipeline_model_parallel_size=2, **OVERLAP, **FULL, samples=16
    ),
    "sequence, pp, FAN recomputed": run_config(**SP, **PP, fan_form="sequence", **selective("fan", "mlp")),
    "pp, cp, untied, uneven": run_config(
        dict(untie_embeddings_and_output_weights=True, num_layers=3),
        **PP,
        **CP,
        num_layers_in_first_pipeline_stage=1,
        dtype="fp32",
    ),
    "Muon, tp, dp, moments in bf16": run_config(
        **TP, optimizer=dict(name="muon", exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    ),
}
RANKS = 4


def resolved(config: RunConfig) -> RunConfig:
    """Without what is left to the machine: simulated ranks choose as over NCCL."""
    overlaps = dict(
        overlap_grad_reduce=bool(config.parallel.overlap_grad_reduce),
        overlap_param_gather=bool(config.parallel.overlap_param_gather),
    )
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, **overlaps))


class FollowedRank(NamedTuple):
    """What a rank holds at its peak and between steps, and what it communicates."""

    peak_bytes: int
    held_bytes: int
    collectives: list[CollectiveCount]


@contextlib.contextmanager
def collectives_unseen() -> Iterator[None]:
    """Without what gloo copies."""
    with mock.patch.object(dist.Work, "wait", unseen(dist.Work.wait)):
        yield


def followed(config: RunConfig) -> FollowedRank:
    tracker = MemoryTracker()
    with collectives_unseen(), tracker, rank_grid(config.parallel, "cpu") as grid:
        _, collectives = take_steps(config, grid, seed=0, tracker=tracker)
        return FollowedRank(tracker.peak_bytes, tracker.held_bytes, collectives)


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


ATTEMPTS = 12
"""gloo's threads may hold on to a tensor after it was waited for, on a busy machine for long, and adds to the peak."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "selective" in name else pytest.mark.full) for name in CONFIGS]
)
def test_a_simulated_rank_is_the_real_one(name: str, run_on_ranks: RunOnRanks) -> None:
    config = resolved(CONFIGS[name])
    simulated = [run_rank(config, world_size=RANKS, rank=rank, backend="gloo") for rank in range(RANKS)]
    expected = [FollowedRank(rank.peak_bytes, rank.held_bytes, rank.collectives) for rank in simulated]
    real = run_on_ranks(RANKS, followed, config)
    for _ in range(ATTEMPTS - 1):
        if real != expected:
            again = run_on_ranks(RANKS, followed, config)
            real = [
                one._replace(
                    peak_bytes=min(one.peak_bytes, two.peak_bytes), held_bytes=min(one.held_bytes, two.held_bytes)
                )
                for one, two in zip(real, again, strict=True)
            ]
    assert real == expected


# -- which ranks and micro batches stand for all

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


# -- planted faults

WORLD = 64
SOUND = run_config(
    samples=64, tensor_model_parallel_size=2, sequence_parallel=True, pipeline_model_parallel_size=2, dtype="bf16"
)
LAST_STAGE = WORLD // 2


def last_stage() -> SimulatedRank:
    return run_rank(SOUND, world_size=WORLD, rank=LAST_STAGE)


@pytest.fixture(scope="module")
def sound() -> SimulatedRank:
    simulated = last_stage()
    assert simulated.communication_differences() == []
    return simulated


def double_a_gather(patch: pytest.MonkeyPatch) -> None:
    """In front of every column parallel map."""
    from megatron.core.tensor_parallel import mappings

    gather = mappings._gather_along_first_dim

    def twice(*args: Any, **kwargs: Any) -> torch.Tensor:
        gather(*args, **kwargs)
        return gather(*args, **kwargs)

    patch.setattr(mappings, "_gather_along_first_dim", twice)


def pad_buckets_otherwise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        step,
        "DistributedDataParallelConfig",
        functools.partial(step.DistributedDataParallelConfig, pad_buckets_for_high_nccl_busbw=True),
    )


def forget_the_head(patch: pytest.MonkeyPatch) -> None:
    def chunks(*args: Any) -> list[gradient_buffers.Chunk]:
        return [dataclasses.replace(chunk, has_head=False) for chunk in gradient_buffers.chunks(*args)]

    patch.setattr(communication, "chunks", chunks)


FAULTS: list[tuple[Callable[[pytest.MonkeyPatch], None], set[str]]] = [
    (double_a_gather, {"tp all-gather"}),
    (pad_buckets_otherwise, {"dp_cp all-gather", "dp_cp reduce-scatter"}),
    (
        forget_the_head,
        {
            "tp all-gather",
            "tp all-reduce",
            "tp reduce-scatter",
            "dp_cp all-gather",
            "dp_cp reduce-scatter",
            "embd all-reduce",
        },
    ),
]


@pytest.mark.parametrize(("plant", "named"), FAULTS, ids=[plant.__name__ for plant, _ in FAULTS])
def test_a_planted_fault_is_named(
    plant: Callable[[pytest.MonkeyPatch], None],
    named: set[str],
    sound: SimulatedRank,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    lines = last_stage().communication_differences()
    assert {line.split(": ")[1] for line in lines} == named
    assert all(line.startswith(f"stage 1 (rank {LAST_STAGE} of {WORLD}): ") for line in lines)


def test_a_peak_may_be_off_by_the_tolerance(sound: SimulatedRank) -> None:
    formula = sound.formula_peak_bytes
    near, far = (dataclasses.replace(sound, peak_bytes=round(formula * (1 + PEAK_TOLERANCE * k))) for k in (0.9, 1.2))
    assert near.peak_differences() == []
    (line,) = far.peak_differences()
    assert f"memory: counted a peak of {far.peak_bytes:,} bytes, by formula {formula:,}, -" in line
