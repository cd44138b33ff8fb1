"""What the tests of Engine layers run on a rank: passes of one small model, and what reached its products."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from megatron_fanformer.model.build import build_stages
from megatron_fanformer.model.config import FANConfig, FANformerConfig, KernelsConfig, PrecisionConfig
from megatron_fanformer.parity.recording import TensorPart, weight_parts
from megatron_fanformer.parity.reordering import Reordering
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.runtime.parallel import rank_grid
from megatron_fanformer.runtime.pipeline import packed_documents
from megatron_fanformer.runtime.seeding import seed_everything
from megatron_fanformer.train.step import wrap_stages
from tests.engine_on_cpu import products

# Every size of a product is a multiple of 32 on one rank and on two, as FP8's recipes ask; no two maps have the same
# shape, by which the products are told apart.
MODEL = FANformerConfig(
    num_layers=2, hidden_size=256, ffn_hidden_size=512, num_attention_heads=4, vocab_size=256, seq_length=128
)
VARIANTS = {
    "paper": MODEL,
    "gelu, no bias": dataclasses.replace(MODEL, fan=FANConfig(p_ratio=0.125, activation="gelu", bias=False)),
    "qk_and_v": dataclasses.replace(MODEL, fan=FANConfig(placement="qk_and_v")),
    "Transformer": dataclasses.replace(MODEL, fan=FANConfig(placement="none")),
    "norms of heads, grouped": dataclasses.replace(MODEL, qk_layernorm=True, num_query_groups=2),
}


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "tp2 sp, FAN sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "fan_form": "sequence"},
}
X_F_RECOMPUTED = "tp2 sp, X_F recomputed"
FIELDS = {
    **LAYOUTS,
    X_F_RECOMPUTED: {**LAYOUTS["tp2 sp"], "recompute_granularity": "selective", "recompute_modules": ["fan"]},
}
"""The layouts, and one that computes the same as another, bit for bit."""


DOCUMENTS = (50, 1, 37, 40, 64, 64)
"""The lengths of the documents in the two samples."""


class Pass(NamedTuple):
    """What a forward and backward pass showed on one rank."""

    loss: float
    gradients: list[TensorPart]
    """This rank's parts."""
    in_fp8: dict[tuple[int, ...], set[tuple[str, bool, bool]]]
    """By the shape of the weight on this rank: the kinds of products, and whether each operand was in FP8."""


@contextmanager
def model_on_rank(
    implementation: str,
    model: FANformerConfig,
    layout: str,
    precision: PrecisionConfig | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **parallel_fields: Any,
) -> Iterator[tuple[Any, Any]]:
    """One stage of the model with its weights of one seed, and the grid."""
    parallel, kernels = (
        ParallelConfig(**FIELDS[layout], **parallel_fields),
        KernelsConfig(transformer_impl=implementation),
    )
    with rank_grid(parallel, "cuda") as grid:
        seed_everything(0)
        (stage,) = build_stages(model, parallel, grid, dtype=dtype, seed=3, precision=precision, kernels=kernels)
        yield stage, grid


def batch() -> tuple[Tensor, Tensor]:
    """Two samples of tokens and their positions."""
    tokens = torch.randint(MODEL.vocab_size, (2, MODEL.seq_length), generator=torch.Generator().manual_seed(1))
    return tokens, torch.arange(MODEL.seq_length).expand(2, -1)


def one_pass(
    implementation: str,
    variant: str,
    layout: str,
    precision: PrecisionConfig | None = None,
    dtype: torch.dtype = torch.bfloat16,
    passes: int = 1,
    within_documents: bool = False,
) -> Pass:
    """The last of so many passes; if `within_documents`, attention stays within those of `DOCUMENTS`."""
    with model_on_rank(implementation, VARIANTS[variant], layout, precision, dtype) as (stage, grid):
        (wrapped,) = wrap_stages([stage], ParallelConfig(**FIELDS[layout], use_distributed_optimizer=False))
        tokens, positions = batch()
        packed = None
        if within_documents:
            tokens, positions = tokens.view(1, -1), positions.reshape(1, -1)
            ids = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))
            packed = packed_documents(ids.unsqueeze(0), "cpu")
        for _ in range(passes):
            wrapped.zero_grad_buffer()
            stage.set_is_first_microbatch()  # as the schedules do: the Engine then makes the FP8 weights anew
            with recorded_products() as seen:
                losses = wrapped(
                    tokens,
                    positions,
                    None,
                    labels=tokens.roll(-1, 1),
                    loss_mask=torch.ones(tokens.shape),
                    packed_seq_params=packed,
                )
                losses.float().sum().backward()
        finalize_model_grads([wrapped], pg_collection=grid.groups)
        gradients = weight_parts([stage], grid, Reordering(MODEL, 1, 0), of_gradients=True)
        return Pass(losses.float().mean().item(), gradients, seen)


@contextmanager
def recorded_products() -> Iterator[dict[tuple[int, ...], set[tuple[str, bool, bool]]]]:
    """By the weight's shape: TN is the forward product, NN the input's gradient, NT the weight's."""
    seen: dict[tuple[int, ...], set[tuple[str, bool, bool]]] = {}

    def watch(product: products.Product) -> None:
        first, second = product.shapes
        shape = (second[-1], first[-1]) if product.layout == "NT" else first
        seen.setdefault(tuple(shape), set()).add((product.layout, *product.in_fp8))

    products.watchers.append(watch)
    try:
        yield seen
    finally:
        products.watchers.remove(watch)


def ranks_of(layout: str) -> int:
    """Ranks of a layout of the table."""
    return FIELDS[layout].get("tensor_model_parallel_size", 1)


def whole_gradients(ranks: list[Pass]) -> dict[str, Tensor]:
    """All ranks' parts put together."""
    whole: dict[str, Tensor] = {}
    for each in ranks:
        for part in each.gradients:
            whole.setdefault(part.name, torch.zeros(part.shape))[part.where] = torch.from_numpy(part.values)
    return whole


def worst_gradient(ranks: list[Pass], reference: list[Pass]) -> float:
    """The largest norm of a gradient's difference, over the norm."""
    ours, theirs = whole_gradients(ranks), whole_gradients(reference)
    assert ours.keys() == theirs.keys()
    return max(((ours[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs)
