"""Attention within documents: the model computes of packed documents what it computes of each alone."""

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fanformer.model.config import FANformerConfig, KernelsConfig
from megatron_fanformer.model.layout_rules import document_problems
from megatron_fanformer.model.local_layers import TorchCoreAttention
from megatron_fanformer.parity.recording import gather_gradients, weight_parts
from megatron_fanformer.parity.reordering import Reordering
from megatron_fanformer.parity.trial import TrialConfig, prepare_rank
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.runtime.pipeline import packed_documents
from megatron_fanformer.train.optimizer import OptimizerConfig
from megatron_fanformer.train.step import attempt_step
from tests.small_runs import RunOnRanks
from tests.tiny import tiny_model
from tests.train.layouts import layout, ranks_of

SAME = 1e-6  # a loss, or the norm of a gradient's difference, relative: float32 sums in another order
SEQ_LENGTH, SAMPLES, MICRO_BATCH = 32, 4, 2
# Of each sample; documents of one token, of equal length side by side, and a sample that is one document.
LENGTHS = ([7, 1, 12, 12], [32], [1, 1, 1, 9, 20], [5, 8, 8, 11])
GROUPED, PLAIN = tiny_model(seq_length=SEQ_LENGTH, num_query_groups=2), tiny_model(seq_length=SEQ_LENGTH)
TRIAL = TrialConfig(
    model=GROUPED,
    optimizer=OptimizerConfig(lr=1e-3),
    global_batch_size=SAMPLES,
    micro_batch_size=MICRO_BATCH,
    steps=1,
    dtype="fp32",
    device="cpu",
    kernels=KernelsConfig(transformer_impl="local"),
)


def samples() -> dict[str, Tensor]:
    """All samples, [samples, s] each; no loss where a document ends, as by `data.eod_mask_loss`."""
    tokens = torch.randint(100, (SAMPLES, SEQ_LENGTH + 1), generator=torch.Generator().manual_seed(1))
    ids = torch.stack([torch.arange(len(own)).repeat_interleave(torch.tensor(own)) for own in LENGTHS])
    is_last = torch.cat([ids[:, 1:] != ids[:, :-1], torch.zeros(SAMPLES, 1, dtype=torch.bool)], 1)
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": (~is_last).float(),
        "position_ids": torch.arange(SEQ_LENGTH).expand(SAMPLES, -1),
        "document_ids": ids.int(),
    }


def packed(size: int, rank: int, replicas: int) -> Iterator[dict[str, Tensor]]:
    """A replica's micro batches of so many whole samples."""
    for first in range(rank * size, SAMPLES, replicas * size):
        yield {name: tensor[first : first + size] for name, tensor in samples().items()}


def unpacked() -> list[dict[str, Tensor]]:
    """Each document as a micro batch of its own, in today's form."""
    alone = []
    for sample, lengths in enumerate(LENGTHS):
        for own in torch.arange(SEQ_LENGTH).split(lengths):
            parts = {name: tensor[sample : sample + 1, own] for name, tensor in samples().items()}
            del parts["document_ids"]
            alone.append({**parts, "position_ids": torch.arange(len(own)).unsqueeze(0)})
    return alone


def one_step(
    parallel: ParallelConfig, placement: str, model: FANformerConfig, micro_batch: int | None
) -> tuple[float, int, list[Any]]:
    """A step's mean loss, its tokens, and this rank's parts of the gradients; without a micro batch each document is
    one of its own.
    """
    fan = dataclasses.replace(model.fan, placement=placement)
    trial = dataclasses.replace(
        TRIAL, model=dataclasses.replace(model, fan=fan), micro_batch_size=micro_batch or MICRO_BATCH
    )
    order = Reordering(trial.model, SAMPLES, 0)
    with prepare_rank(trial, parallel, order) as (grid, stages, wrapped, optimizer, _, number, _):
        if micro_batch is None:
            batches, number = iter(unpacked()), len(unpacked())
        else:
            batches = packed(micro_batch, grid.data_parallel_rank, grid.data_parallel_size)
        result = attempt_step(wrapped, optimizer, batches, grid, number)
        gather_gradients(wrapped)
        return result.loss, result.tokens, weight_parts(stages, grid, order, of_gradients=True)


def whole(ranks: list[tuple[float, int, list[Any]]]) -> dict[str, Tensor]:
    gradients: dict[str, Tensor] = {}
    for _, _, parts in ranks:
        for part in parts:
            gradients.setdefault(part.name, torch.full(part.shape, torch.nan))[part.where] = torch.from_numpy(
                part.values
            )
    return gradients


LAYOUTS = "recompute=selective", "tp=2,sp=true,recompute=full", "tp=2,sp=true,fan=sequence", "pp=2", "dp=2"


@pytest.mark.parametrize(
    ("text", "placement"),
    [
        ("", "qkv"),
        *(pytest.param(text, "qkv", marks=pytest.mark.full) for text in LAYOUTS),
        pytest.param("tp=2", "qk_and_v", marks=pytest.mark.full),
    ],
)
def test_packed_equals_unpacked(run_on_ranks: RunOnRanks, text: str, placement: str) -> None:
    parallel = layout(text)
    # TP 2 alone rounds differently than one process, by 1.3e-6 of a gradient of `qk_and_v`: packing is what is asked
    # here. The other layouts take no micro batches of documents of any length.
    alone = parallel if text == "tp=2" else layout()
    one_by_one = run_on_ranks(alone.model_parallel_size, one_step, alone, placement, GROUPED, None)
    together = run_on_ranks(ranks_of(parallel), one_step, parallel, placement, GROUPED, MICRO_BATCH)
    assert_same(together, one_by_one)


# By heads. Of one sample a row, ranks' parts end within documents; one document is on all ranks, and many are on one.
HEADS = "cp_comm_type=a2a"
SPREAD = (
    ("cp=2", "qkv", GROUPED, 1),
    ("cp=4", "qkv", PLAIN, MICRO_BATCH),
    ("cp=4,recompute=selective", "qk_and_v", PLAIN, 1),
    ("cp=2,recompute=full", "none", GROUPED, 1),
    ("tp=2,sp=true,cp=2,fan=sequence", "qk_and_v", PLAIN, MICRO_BATCH),
    ("cp=2,pp=2", "qkv", GROUPED, 1),
    ("cp=2,dp=2", "qkv", GROUPED, 1),
)


@pytest.mark.parametrize(
    ("text", "placement", "model", "micro_batch"),
    [
        pytest.param(*case, id=" ".join(map(str, (*case[:2], case[3]))), marks=pytest.mark.full if number else ())
        for number, case in enumerate(SPREAD)
    ],
)
def test_context_parallel_ranks_compute_as_one(
    run_on_ranks: RunOnRanks, text: str, placement: str, model: FANformerConfig, micro_batch: int
) -> None:
    parallel = layout(f"{text},{HEADS}")
    alone = layout("tp=2" if "tp=2" in text else "")  # whose products are rounded as these
    one_by_one = run_on_ranks(ranks_of(alone), one_step, alone, placement, model, None)
    assert_same(run_on_ranks(ranks_of(parallel), one_step, parallel, placement, model, micro_batch), one_by_one)


def assert_same(together: list[tuple[float, int, list[Any]]], one_by_one: list[tuple[float, int, list[Any]]]) -> None:
    (loss, tokens, _), expected, found = one_by_one[0], whole(one_by_one), whole(together)
    assert {rank[1] for rank in together} == {tokens}
    assert together[0][0] == pytest.approx(loss, rel=SAME, abs=0)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= SAME * gradient.norm(), name


# -- the parts


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def test_attention_is_that_of_the_mask_and_does_no_work_for_other_documents() -> None:
    lengths, heads, groups, size = [3, 3, 1, 20, 4, 4, 4, 9], 4, 2, 8
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(sum(lengths), n, size, dtype=torch.float64, generator=generator, requires_grad=True)
        for n in (heads, groups, groups, heads)
    )
    pairs, plain = [], F.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        pairs.append(query[..., 0].numel() // heads * key.shape[-2])
        return plain(query, key, value, **options)

    attention = TorchCoreAttention.__new__(TorchCoreAttention)
    torch.nn.Module.__init__(attention)
    attention.softmax_scale = None
    with mock.patch.object(F, "scaled_dot_product_attention", watched):
        found = attention._attend_within(bounds_of(lengths), query, key, value, is_causal=True)
    assert len(pairs) == 5  # documents side by side of one length at once
    assert sum(pairs) == sum(length**2 for length in lengths)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mask = (ids[:, None] == ids[None]).tril()
    whole_row = (x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1) for x in (query, key, value))
    expected = F.scaled_dot_product_attention(*whole_row, attn_mask=mask).transpose(0, 1).flatten(1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(x, (query, key, value), grad.flatten(1)) for x in (found, expected)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_documents_end_where_samples_do() -> None:
    ids = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 2, 2]])
    packed = packed_documents(ids, "cpu")
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [0, 2, 4, 8, 9, 10, 12]
    assert packed.max_seqlen_q == packed.max_seqlen_kv == 4


@pytest.mark.parametrize(
    ("parallel", "kernels", "part"),
    [
        ({"context_parallel_size": 2}, {}, "parallel.context_parallel_size 2 and cp_comm_type null"),
        ({"context_parallel_size": 2, "cp_comm_type": "p2p"}, {}, "set parallel.cp_comm_type to a2a"),
        ({}, {"cuda_graph_impl": "local"}, "kernels.cuda_graph_impl local"),
        ({}, {"fused_single_qkv_rope": True}, "kernels.fused_single_qkv_rope"),
    ],
)
def test_what_cannot_is_refused_by_name(parallel: dict[str, Any], kernels: dict[str, Any], part: str) -> None:
    (problem,) = document_problems(ParallelConfig(**parallel), KernelsConfig(**kernels))
    assert part in problem
