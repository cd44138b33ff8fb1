"""The formula of a step's communication against the count of it, which it must equal exactly, on every rank."""

import dataclasses
import functools
import re
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fanformer.data.batches import shared_batches
from megatron_fanformer.model.build import build_stages
from megatron_fanformer.model.config import FANConfig, KernelsConfig, PrecisionConfig, torch_dtype
from megatron_fanformer.plan.communication import communication
from megatron_fanformer.plan.gradient_buffers import Chunk, Weight, chunks, gradient_buffer, limits_buckets, weights
from megatron_fanformer.plan.job import Job
from megatron_fanformer.plan.matrix_updates import Term
from megatron_fanformer.runtime.parallel import RankGrid, rank_grid
from megatron_fanformer.runtime.seeding import seed_everything
from megatron_fanformer.train.optimizer import OptimizerConfig, build_optimizer
from megatron_fanformer.train.step import train_step, wrap_stages
from tests.plan.collectives import CollectiveCount, count_collectives, totals
from tests.plan.runs import job_of
from tests.tiny import tiny_model
from tests.train.layouts import layout

RunOnRanks = Callable[..., list[Any]]

# Sizes that no padding fits by itself: the FAN bias has 48 rows, the vocabulary 250 ids.
MODEL = tiny_model(hidden_size=64, ffn_hidden_size=104, vocab_size=250, make_vocab_size_divisible_by=8, seq_length=32)

TP = dict(tensor_model_parallel_size=2)
SP = dict(**TP, sequence_parallel=True)
SEQUENCE = dict(**SP, fan_form="sequence")
PP = dict(pipeline_model_parallel_size=2)
VPP = dict(**PP, virtual_pipeline_model_parallel_size=2)
CP = dict(context_parallel_size=2)
HEADS = dict(**CP, cp_comm_type="a2a")
DP = dict(data_parallel_size=2)
PLAIN = dict(use_distributed_optimizer=False)
OVERLAP = dict(overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=6000)
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
BLOCK = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=1)
SELECTIVE = dict(recompute_granularity="selective", recompute_modules=["core_attn", "layernorm", "mlp"])

FAN_AGAIN = dict(recompute_granularity="selective", recompute_modules=["fan", "mlp"])

TRANSFORMER = dict(fan=FANConfig(placement="none"))
OWN_VALUES = dict(fan=FANConfig(placement="qk_and_v", v_p_ratio=0.125))
FFN = dict(fan=FANConfig(placement="ffn", activation="gelu"))
GROUPED = dict(num_query_groups=2)
UNTIED = dict(untie_embeddings_and_output_weights=True)
DEEP = dict(num_layers=4)
UNEVEN = dict(num_layers=3)

Case = tuple[dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "tp, no bias, bf16": (dict(fan=FANConfig(bias=False, p_ratio=0.125)), dict(**TP, dtype="bf16")),
    "sp, transformer, norms of heads": ({**TRANSFORMER, "qk_layernorm": True}, SP),
    "sp, own values, grouped": ({**OWN_VALUES, **GROUPED}, SP),
    "sp, own values, FAN recomputed": (OWN_VALUES, dict(**SP, **FAN_AGAIN)),
    "sp, FAN layers for the MLP": (FFN, dict(**SP, **SELECTIVE)),
    "sequence, recomputed": (GROUPED, dict(**SEQUENCE, **FULL)),
    "cp, selective": ({}, dict(**CP, **SELECTIVE)),
    "cp, by heads, within documents": ({}, dict(**HEADS, **SELECTIVE, has_document_ids=True)),
    "dp plain": ({}, dict(**DP, **PLAIN)),
    "dp, bf16": ({}, dict(**DP, dtype="bf16")),
    "dp, overlap": ({}, dict(**DP, **OVERLAP)),
    "pp, uneven": (UNEVEN, dict(**PP, num_layers_in_first_pipeline_stage=1)),
    "vpp": (DEEP, VPP),
    "tp, loss in chunks": ({}, dict(**TP, loss_head_chunk_tokens=27)),
    "sp, loss in chunks": (UNTIED, dict(**SP, loss_head_chunk_tokens=32)),
    "sp, Megatron's loss head": ({}, dict(**SP, chunked_loss_head=False)),
    "tp, within documents": ({}, dict(**TP, has_document_ids=True)),
}
KERNELS = ("loss_head_chunk_tokens", "chunked_loss_head")


def job_of_case(case: Case) -> Job:
    model, degrees = case
    degrees = {**degrees}
    precision = PrecisionConfig(
        dtype=degrees.pop("dtype", "fp32"), grad_reduce_in_fp32=degrees.pop("grad_reduce_in_fp32", True)
    )
    kernels = {name: degrees.pop(name) for name in KERNELS if name in degrees}
    has_document_ids = degrees.pop("has_document_ids", False)
    parallel = layout(**degrees)
    micro_batches = max(2, parallel.pipeline_model_parallel_size)
    whole = dataclasses.replace(MODEL, **model)
    fields = dict(num_micro_batches=micro_batches, has_document_ids=has_document_ids)
    return job_of(whole, parallel, precision=precision, kernels=KernelsConfig(**kernels), **fields)


@dataclasses.dataclass
class CountedRank:
    """What one rank did in a step, and what it holds."""

    stage: int
    lines: list[CollectiveCount]
    calls_seen: int
    calls_dispatched: int
    weights: list[list[Weight]]
    buckets: list[list[int]]


class Dispatched(TorchDispatchMode):
    """Counts collectives in another way: as torch dispatches them, which the count does not rely on."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.namespace == "c10d" and not func._schema.name.startswith("c10d::recv")
        return func(*args, **(kwargs or {}))


def count_step(job: Job, clip_grad: float = 1.0) -> CountedRank:
    """Count the second training step of a run on this rank."""
    dtype = torch_dtype(job.precision.dtype)
    parallel = job.parallel
    with rank_grid(parallel, "cpu") as grid:
        seed_everything(0)
        stages = build_stages(job.model, parallel, grid, dtype=dtype, seed=0, kernels=job.kernels)
        wrapped = wrap_stages(stages, parallel, grad_reduce_in_fp32=job.precision.grad_reduce_in_fp32)
        optimizer = build_optimizer(OptimizerConfig(clip_grad=clip_grad), wrapped)
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = 1e-4, 0.1
        train_step(wrapped, optimizer, shared(job, grid), grid, job.num_micro_batches)
        with Dispatched() as dispatched, count_collectives(grid) as counts:
            train_step(wrapped, optimizer, shared(job, grid), grid, job.num_micro_batches)
        return CountedRank(
            stage=grid.groups.pp.rank(),
            lines=counts.lines(),
            calls_seen=counts.calls_seen,
            calls_dispatched=dispatched.calls,
            weights=[held_weights(chunk, parallel.sequence_parallel) for chunk in stages],
            buckets=[[bucket.grad_data.numel() for bucket in chunk.buffers[0].buckets] for chunk in wrapped],
        )


def shared(job: Job, grid: RankGrid) -> Iterator[dict[str, torch.Tensor]]:
    """As a run shares its samples: a stage between the first and the last takes none, unless for their documents."""
    return shared_batches(
        functools.partial(batches, job),
        grid.samples_group,
        micro_batch_size=job.micro_batch_size,
        seq_length=job.model.seq_length,
        has_document_ids=job.has_document_ids,
        is_used=grid.takes_samples(has_document_ids=job.has_document_ids),
    )


def batches(job: Job) -> Generator[dict[str, torch.Tensor], None, None]:
    shape = (job.micro_batch_size, job.model.seq_length)
    while True:
        tokens = torch.randint(job.model.vocab_size, shape)
        positions = torch.arange(job.model.seq_length).expand(shape)
        batch = {"tokens": tokens, "labels": tokens, "loss_mask": torch.ones(shape), "position_ids": positions}
        yield {**batch, "document_ids": (positions // 9).int()} if job.has_document_ids else batch


def held_weights(chunk: torch.nn.Module, is_sequence_parallel: bool) -> list[Weight]:
    return [
        Weight(
            re.sub(r"^decoder\.layers\.\d+\.", "", name),
            parameter.numel(),
            is_sequence_parallel and getattr(parameter, "sequence_parallel", False),
            getattr(parameter, "shared_embedding", False),
        )
        for name, parameter in chunk.named_parameters()
    ]


def assert_formula_is_the_count(case: Case, ranks: list[CountedRank]) -> None:
    for number, rank in enumerate(ranks):
        job = job_of_case(case)
        assert rank.calls_seen == rank.calls_dispatched, f"rank {number}: the count missed collectives"
        held = [weights(job.model, job.parallel, chunk) for chunk in chunks(job.model, job.parallel, rank.stage)]
        assert held == rank.weights, f"rank {number}"
        lines = communication(job, rank.stage)
        assert totals(lines) == totals(rank.lines), f"rank {number}"
        assert {line.group: line.ranks for line in rank.lines}.items() <= job.group_sizes(rank.stage).items()


@pytest.mark.parametrize("name", CASES)
def test_formula_is_the_count_exactly(name: str, run_on_ranks: RunOnRanks) -> None:
    case = CASES[name]
    job = job_of_case(case)
    assert_formula_is_the_count(case, run_on_ranks(job.world_size, count_step, job))


def lines_of(case: Case, purpose: str) -> list[Term]:
    return [line for line in communication(job_of_case(case), 0) if purpose in line.purpose]


def bytes_of(lines: list[Term]) -> int:
    return sum(line.message_bytes for line in lines)


def activation_bytes(case: Case) -> int:
    """Over the tensor parallel ranks, of a step; gradients of weights left out."""
    return bytes_of([line for line in lines_of(case, "") if line.group == "tp" and "weights" not in line.purpose])


def tokens_and_layers(case: Case) -> int:
    job = job_of_case(case)
    return job.tokens * job.num_micro_batches * job.model.num_layers


@pytest.mark.parametrize("degrees", [TP, SP])
def test_column_gathers_the_pre_activation_in_place_of_x_f(degrees: dict[str, Any]) -> None:
    case = ({}, degrees)
    gathered, scattered = lines_of(case, "FAN pre-activation")
    model = job_of_case(case).model
    wide = tokens_and_layers(case) * model.hidden_size * 4
    assert (gathered.kind, scattered.kind) == ("all-gather", "reduce-scatter")
    assert gathered.message_bytes == scattered.message_bytes == (1 - model.fan.p_ratio) * wide
    # Nothing else is added to a Transformer's traffic: QKV neither gathers nor sums.
    assert activation_bytes(case) == activation_bytes((TRANSFORMER, degrees)) + 2 * gathered.message_bytes


def test_sequence_moves_no_activations_beyond_a_transformers() -> None:
    assert activation_bytes(({}, SEQUENCE)) == activation_bytes((TRANSFORMER, SP))


def test_large_models_are_cut_into_buckets_of_megatrons_own_size() -> None:
    held = [Weight("", 1_000_000)] * 100
    overlap = layout(overlap_grad_reduce=True)
    assert gradient_buffer(held, overlap, 2, is_limited=False).buckets == [100_000_000]
    assert gradient_buffer(held, overlap, 2, is_limited=True).buckets == [40_000_000, 40_000_000, 20_000_000]
    # A million a replica where they are many; the last bucket is padded to a multiple of 128 and of 48.
    assert gradient_buffer(held, overlap, 48, is_limited=True).buckets == [48_000_000, 48_000_000, 4_000_128]


@pytest.mark.parametrize(
    ("overlap", "stage", "number", "limited"),
    [(True, 0, 0, True), (True, 1, 0, False), (True, 0, 1, False), (False, 0, 0, False), (None, 0, 0, False)],
)
def test_the_first_chunk_of_the_first_stage_alone_is_cut(
    overlap: bool | None, stage: int, number: int, limited: bool
) -> None:
    chunk = Chunk(number=number, layers=1, has_embedding=False, has_head=False)
    assert limits_buckets(layout(overlap_grad_reduce=overlap), stage, chunk) is limited
