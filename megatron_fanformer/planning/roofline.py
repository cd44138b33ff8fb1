"""FLOPs and bytes of a training step by operation: what each costs at least on a machine.

An operation's bytes are those of its operands and results, each moved once between memory and the chip: no
implementation moves less, unless it fuses two operations in one kernel. FLOPs are those of `flops` (matrix products,
causal attention's unmasked half); what flash attention recomputes in its backward is not counted.

Letters: m tokens of a micro batch, h hidden size, f inner size of the MLP, k rows of the FAN map, V padded vocabulary;
T tensor parallel ranks.
"""

import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple

from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.planning.gradient_buffers import GRADIENT_BYTES
from megatron_fanformer.runtime.layout import FANForm, RecomputeModule

ZEROED = GRADIENT_BYTES  # of each weight, the gradient's buffer for the next step
UPDATED = 3 * 4  # of each weight: gradient and float32 weight read, the weight written
EMBEDDING_PASSES = 3  # rows read and written, their gradient read
LOGIT_PASSES = 4  # written by the product, read for the softmax, written as gradient, read by both products after it
# Megatron's own cross entropy works in float32 and keeps the logits of a whole micro batch: bytes per logit beyond the
# products', of casting, largest, difference, exponential, sum, quotient; in backward product and cast back.
SEPARATE_SOFTMAX_BYTES = 6 + 4 + 8 + 8 + 4 + 8 + 8 + 6
# Kernels of the cross entropy were measured at 0.28 to 0.32 of a B200's bandwidth, other element-wise ones at 0.67
# (SimuMax, configs/system/b200_bf16_ceperm.json); so its bytes count as so many times themselves.
SOFTMAX_SLOWNESS = 2
# Attention from plain products: scores written, read and written by the softmax, read; in backward the softmax is read,
# its gradient written, both read, the scores' gradient written, and read twice.
SCORE_PASSES_FORWARD, SCORE_PASSES_BACKWARD = 4, 7

Kind = Literal["matrix products", "attention", "element-wise"]


class Work(NamedTuple):
    """The work of one direction of an operation."""

    flops: int
    bytes: int
    kernels: int = 1


class Operation(NamedTuple):
    """One rank's work of one kind for one micro batch."""

    name: str
    kind: Kind
    forward: Work
    backward: Work
    module: RecomputeModule | None = None
    """The entry of `recompute_modules` that recomputes it by itself."""
    operands: int = 0
    """Elements of a product's input and of its output's gradient, which FP8 casts."""


@functools.lru_cache(maxsize=1 << 12)  # a search computes the same layer in many layouts
def layer_operations(
    model: FANformerConfig,
    *,
    tokens: int,
    element_bytes: int,
    ranks: int = 1,
    sequence_parallel: bool = False,
    fan_form: FANForm = "column",
    has_plain_attention: bool = False,
) -> tuple[Operation, ...]:
    """Return the operations of a layer on one tensor parallel rank.

    Args:
        tokens: of the micro batch, on one context parallel rank.
        element_bytes: of weights and activations.
        ranks: T.
        has_plain_attention: whether attention keeps its scores in memory, instead of a flash kernel.
    """
    m, e, h = tokens, element_bytes, model.hidden_size
    own_tokens = m // ranks if sequence_parallel else m  # of norms and residuals
    heads, values = model.num_attention_heads * model.kv_channels // ranks, -(-model.value_size // ranks)
    is_sharded = fan_form == "column"
    fan = _fan(model, m if is_sharded else m // ranks, e, ranks if is_sharded else 1) if model.fan_rows else ()
    rotated = 2 * (heads + values)
    return (
        *fan,
        _product("QKV", m, h, model.qkv_rows // ranks, e),
        _product("attention output", m, heads, h, e),
        *_ffn_products(model, m, e, ranks),
        _attention(model, m, e, heads, values, has_scores=has_plain_attention),
        # Norms: x read, y written; x, its gradient and y's.
        _element_wise("norms", m=own_tokens, widths=(2 * 2 * h, 2 * 3 * h), e=e, kernels=2, module="layernorm"),
        *_head_norms(model, m, e, heads + values),
        _element_wise("rotary embedding", m=m, widths=(rotated, rotated), e=e),
        *(
            _element_wise(name, m=number, widths=widths, e=e, module="mlp")
            for name, number, widths in model.placement.mlp_activations(model, m, own_tokens, ranks)
        ),
        # Two sums, and of their gradients.
        _element_wise("residuals", m=own_tokens, widths=(2 * 3 * h, 2 * 3 * h), e=e, kernels=2),
    )


def head_operation(
    model: FANformerConfig, *, tokens: int, element_bytes: int, ranks: int = 1, is_chunked: bool = True
) -> Operation:
    """Return the loss head on one tensor parallel rank: logits, their cross entropy and its gradient.

    Args:
        is_chunked: whether it is the project's own, or Megatron's.
    """
    columns = model.padded_vocab_size // ranks
    product = _product("loss head", tokens, model.hidden_size, columns, element_bytes)
    # The products' results are logits and their gradient, counted with the softmax between them.
    softmax = element_bytes * (LOGIT_PASSES - 3) if is_chunked else SOFTMAX_SLOWNESS * SEPARATE_SOFTMAX_BYTES
    forward = product.forward
    return Operation(
        name=product.name,
        kind="matrix products",
        forward=forward._replace(bytes=forward.bytes + tokens * columns * softmax, kernels=4),
        backward=product.backward,
    )


def _fan(model: FANformerConfig, m: int, e: int, ranks: int) -> Iterator[Operation]:
    """Yield the FAN map, sharded over so many ranks, and its activation."""
    yield _product("FAN map", m, model.hidden_size, model.fan_rows // ranks, e)
    made = sum(width for width, _ in model.fan.outputs(model.hidden_size, model.value_size))
    # Forward reads p | g and writes X_F; backward reads its gradient and the cos and sin in it, and writes p | g's.
    both = (model.fan_rows + made, model.fan_rows + made + 2 * model.periodic_units)
    yield _element_wise("FAN activation", m=m, widths=both, e=e, module="fan")


def _head_norms(model: FANformerConfig, m: int, e: int, widths: int) -> Iterator[Operation]:
    """Yield the norms of queries and keys, which are so wide together."""
    if model.qk_layernorm:
        yield _element_wise("norms of heads", m=m, widths=(2 * widths, 3 * widths), e=e, kernels=2)


def _ffn_products(model: FANformerConfig, m: int, e: int, ranks: int) -> Iterator[Operation]:
    """Yield the MLP's two maps: ranks share the rows of the first, the columns of the second."""
    (rows, columns), (rows_2, columns_2) = model.ffn_maps
    yield _product("MLP", m, columns, rows // ranks, e, module="mlp")
    yield _product("MLP", m, columns_2 // ranks, rows_2, e, module="mlp")


def _attention(model: FANformerConfig, m: int, e: int, heads: int, values: int, *, has_scores: bool) -> Operation:
    flops = 2 * 2 * heads * model.seq_length // 2 * m
    own = m * (heads + 2 * values) * e  # queries, keys and values
    context = m * heads * e
    # Forward reads them and writes the context; backward reads both and the context's gradient, and writes theirs.
    forward, backward = Work(flops, own + context), Work(2 * flops, 2 * own + 2 * context)
    if has_scores:
        scores = heads // model.kv_channels * m * model.seq_length * e
        forward = Work(2 * flops, forward.bytes + SCORE_PASSES_FORWARD * scores, kernels=3)
        backward = Work(4 * flops, backward.bytes + SCORE_PASSES_BACKWARD * scores, kernels=5)
    return Operation(name="attention", kind="attention", module="core_attn", forward=forward, backward=backward)


def _product(name: str, m: int, inner: int, rows: int, e: int, module: RecomputeModule | None = None) -> Operation:
    """Return the product with a weight [rows, inner]: forward, the input's gradient and the weight's, added up in
    float32.
    """
    flops = 2 * m * inner * rows
    moved = (m * inner + rows * inner + m * rows) * e
    weight_gradient = (m * inner + m * rows) * e + 2 * rows * inner * GRADIENT_BYTES
    return Operation(
        name=name,
        kind="matrix products",
        module=module,
        forward=Work(flops, moved),
        backward=Work(2 * flops, moved + weight_gradient, kernels=2),
        operands=m * (inner + rows),
    )


def _element_wise(
    name: str, *, m: int, widths: tuple[int, int], e: int, kernels: int = 1, module: RecomputeModule | None = None
) -> Operation:
    """Return numbers read and written of each token, forward and backward."""
    forward, backward = (Work(0, m * width * e, kernels) for width in widths)
    return Operation(name=name, kind="element-wise", module=module, forward=forward, backward=backward)
