"""FLOPs and bytes of a training step by part: the least that each part can cost on a machine.

A part's bytes are those of its operands and results, each moved once between memory and the chip: no implementation
moves less, unless it fuses two parts in one kernel. FLOPs are those of `flops` (matrix products, causal attention's
unmasked half); what flash attention recomputes in its backward is not counted.

Letters: m tokens of a micro batch, h hidden size, f inner size of the MLP, k rows of the FAN map, V padded vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.planning.flops import BACKWARD_AND_FORWARD

GRADIENT_BYTES = 4  # weight gradients are added up in float32
# Of each weight: gradient, float32 weight and two moments read; the latter three written, and the gradient's buffer
# zeroed for the next step.
OPTIMIZER_READ, OPTIMIZER_WRITTEN = 4 + 3 * 4, 3 * 4 + 4
LOGIT_PASSES = 4  # written by the product, read for the softmax, written as gradient, read by both products after it


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one kind of work adds up to in a step of one micro batch, forward and backward."""

    name: str
    flops: int
    bytes: int

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The least time: of computing, or of moving, whichever is longer."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)


def step_parts(model: FANformerConfig, *, tokens: int, element_bytes: int) -> list[Part]:
    """Every part of a step of one micro batch and one update, on one rank that holds the whole model.

    Args:
        tokens: of the micro batch.
        element_bytes: of weights and activations.
    """
    layer = [*_layer_products(model, tokens, element_bytes), *_element_wise(model, tokens, element_bytes)]
    parts = [Part(name=p.name, flops=p.flops * model.num_layers, bytes=p.bytes * model.num_layers) for p in layer]
    head = _product("loss head", tokens, model.hidden_size, model.padded_vocab_size, element_bytes)
    # Its products' results are logits and their gradient, counted with the softmax between them.
    softmax = tokens * model.padded_vocab_size * element_bytes * (LOGIT_PASSES - 3)
    embedding = 3 * tokens * model.hidden_size * element_bytes
    copy = element_bytes if element_bytes < 4 else 0  # in float32 the weight is the one that is updated
    per_weight = OPTIMIZER_READ + OPTIMIZER_WRITTEN + copy
    return [
        *parts,
        Part(name=head.name, flops=head.flops, bytes=head.bytes + softmax),
        Part(name="embedding", flops=0, bytes=embedding),
        Part(name="optimizer", flops=0, bytes=model.num_parameters * per_weight),
    ]


def _layer_products(model: FANformerConfig, m: int, e: int) -> Iterator[Part]:
    h, f = model.hidden_size, model.ffn_hidden_size
    heads = model.num_attention_heads * model.kv_channels
    if model.has_fan:
        yield _product("FAN map", m, h, model.fan_rows, e)
    yield _product("QKV", m, h, model.qkv_rows, e)
    yield _product("attention output", m, heads, h, e)
    yield _product("MLP", m, h, 2 * f, e, also=_product("", m, f, h, e))
    forward_flops = 2 * 2 * heads * model.seq_length // 2 * m
    own = m * (heads + 2 * model.value_size) * e  # queries, keys and values
    context = m * heads * e
    # Forward reads them and writes the context; backward reads both and the context's gradient, and writes theirs.
    yield Part(name="attention", flops=BACKWARD_AND_FORWARD * forward_flops, bytes=3 * own + 3 * context)


def _product(name: str, m: int, inner: int, rows: int, e: int, also: Part | None = None) -> Part:
    """One weight [rows, inner]: forward, the input's gradient and the weight's own, which is added up in float32."""
    operands = (m * inner + rows * inner + m * rows) * e
    weight_gradient = (m * inner + m * rows) * e + 2 * rows * inner * GRADIENT_BYTES
    return Part(
        name=name,
        flops=BACKWARD_AND_FORWARD * 2 * m * inner * rows + (also.flops if also else 0),
        bytes=2 * operands + weight_gradient + (also.bytes if also else 0),
    )


def _element_wise(model: FANformerConfig, m: int, e: int) -> Iterator[Part]:
    h, f, heads = model.hidden_size, model.ffn_hidden_size, model.num_attention_heads * model.kv_channels
    if model.has_fan:
        widths = model.fan.outputs(h, model.value_size)
        periodic = sum(int(p_ratio * width) for width, p_ratio in widths)
        made = sum(width for width, _ in widths)
        # Forward reads p | g and writes X_F; backward reads its gradient and the cos and sin in it, and writes p | g's.
        yield Part(name="FAN activation", flops=0, bytes=m * (2 * model.fan_rows + 2 * made + 2 * periodic) * e)
    yield Part(name="norms", flops=0, bytes=2 * m * 5 * h * e)  # x read, y written; x, its gradient and y's
    yield Part(name="rotary embedding", flops=0, bytes=2 * m * 2 * (heads + model.value_size) * e)
    yield Part(name="SwiGLU", flops=0, bytes=m * (3 + 5) * f * e)
    yield Part(name="residuals", flops=0, bytes=2 * m * (3 + 3) * h * e)  # two sums, and of their gradients
