"""What one micro batch makes a chunk of layers communicate, in forward, in backward and in what backward recomputes.

Column parallel maps read an input that all tensor parallel ranks need, row parallel maps make one that is a sum over
them; sequence parallelism shards both along the sequence. Everything else is explained below.
"""

from collections.abc import Iterator

from megatron_fanformer.planning.gradient_buffers import Chunk
from megatron_fanformer.planning.step_traffic import StepTraffic, Term

LOGIT_STATISTIC_BYTES = 4  # the cross entropy is computed in float32
ROW_OUTPUT = "row-parallel output"
PRE_ACTIVATION = "FAN pre-activation"


def chunk_terms(step: StepTraffic, chunk: Chunk) -> Iterator[Term]:
    """The terms of one micro batch through one chunk, both ways."""
    if chunk.has_embedding:
        yield from embedding_terms(step)
    for term in (*layer_forward(step), *layer_backward(step)):
        yield term.times(chunk.layers)
    for term in recomputed(step):
        yield term.again().times(recomputed_layers(step, chunk.layers))
    if chunk.has_head:
        yield from head_terms(step)


def embedding_terms(step: StepTraffic) -> Iterator[Term]:
    """The terms of the embedding, both ways: each rank looks up its part of the vocabulary; the parts are summed."""
    yield from (*_sum(step, "embedding"), *_sum_gradient(step, "embedding"))


def head_terms(step: StepTraffic) -> Iterator[Term]:
    """The terms of the loss head, both ways."""
    yield from _gather(step, "the head")
    # Of each token: its largest logit, its label's and the sum of exponentials, each of a shard of the vocabulary.
    statistics = Term("tp", "all-reduce", "vocabulary cross entropy", step.tokens * LOGIT_STATISTIC_BYTES).times(3)
    if step.kernels.chunked_loss_head:
        # The last two are summed together, of a chunk of tokens at a time. The gradient is taken while the whole input
        # is still there.
        yield statistics._replace(calls=2 * step.loss_chunks)
        yield from _sum(step, "input gradient of the head")
    else:
        yield statistics
        yield from _gather_gradient(step, "the head")


def layer_forward(step: StepTraffic) -> Iterator[Term]:
    """The terms of one layer's forward."""
    yield from _gather(step, _first_map(step))
    for kind, _, purpose, message_bytes in _before_heads(step):
        yield Term("tp", kind, purpose, message_bytes)
    yield from _core_attention_forward(step)
    yield from _sum(step, ROW_OUTPUT)
    yield from _mlp_forward(step)


def _mlp_forward(step: StepTraffic) -> Iterator[Term]:
    yield from _gather(step, "the MLP")
    yield from _sum(step, ROW_OUTPUT, _ffn_output_bytes(step))


def _core_attention_forward(step: StepTraffic) -> Iterator[Term]:
    yield Term("cp", "all-gather", "keys and values", _keys_and_values_bytes(step))


def layer_backward(step: StepTraffic) -> Iterator[Term]:
    """The terms of one layer's backward, without what it recomputes."""
    yield from _gather_gradient(step, _first_map(step))
    for _, kind, purpose, message_bytes in _before_heads(step):
        yield Term("tp", kind, purpose, message_bytes)
    yield Term("cp", "reduce-scatter", "keys and values", _keys_and_values_bytes(step))
    yield from _sum_gradient(step, ROW_OUTPUT)
    yield from _gather_gradient(step, "the MLP")
    yield from _sum_gradient(step, ROW_OUTPUT, _ffn_output_bytes(step))


def recomputed(step: StepTraffic) -> Iterator[Term]:
    """Return what of a layer's forward runs again; the norms, which may be named too, communicate nothing."""
    if step.parallel.recompute_granularity == "full":
        yield from layer_forward(step)
    if step.parallel.recomputes("fan") and step.has_column_fan:
        yield Term("tp", "all-gather", PRE_ACTIVATION, _pre_activation_bytes(step))
    if step.parallel.recomputes("core_attn"):
        yield from _core_attention_forward(step)
    if step.parallel.recomputes("mlp"):
        yield from _mlp_forward(step)


def recomputed_layers(step: StepTraffic, layers: int) -> int:
    """Return how many of so many layers are recomputed: all of a chunk, or with method `block` the first few."""
    return min(layers, step.parallel.recompute_num_layers or 0) if step.parallel.recompute_method == "block" else layers


def _first_map(step: StepTraffic) -> str:
    """The map that reads the layer's input and needs it on all ranks (of X_F, in the `sequence` form)."""
    return "FAN" if step.has_column_fan else "QKV"


def _before_heads(step: StepTraffic) -> Iterator[tuple[str, str, str, int]]:
    """Kind in forward, kind in backward, purpose and bytes of what tensor parallel ranks exchange for their heads."""
    model = step.model
    if step.has_column_fan:
        # p | g of all ranks, k wide, in place of X_F; QKV, whose input is then whole, neither gathers nor sums.
        yield "all-gather", "reduce-scatter", PRE_ACTIVATION, _pre_activation_bytes(step)
    elif width := model.placement.exchanged_values(model):
        # A rank made all values of its part of the sequence, [c / T, b, v], and needs its own heads' of the whole.
        values_bytes = step.activation_bytes // step.tensor_ranks * width
        yield "all-to-all", "all-to-all", "values, from tokens to heads", values_bytes
    if model.query_groups < step.tensor_ranks:
        # Megatron gathers the whole output of QKV, and each rank takes its own heads out of it.
        yield "all-gather", "reduce-scatter", "QKV of shared groups", step.activation_bytes * model.qkv_rows


def _pre_activation_bytes(step: StepTraffic) -> int:
    """Bytes of p | g of all ranks, [c, b, k]."""
    return step.activation_bytes * step.model.fan_rows


def _ffn_output_bytes(step: StepTraffic) -> int:
    """Bytes of what the MLP's second map makes, [c, b, h]; of its p | g, where it is a FAN layer's."""
    _, (rows, _) = step.model.ffn_maps
    return step.activation_bytes * rows


def _keys_and_values_bytes(step: StepTraffic) -> int:
    """Bytes of the whole sequence's, of one rank's heads: [s, b, heads, 2 d], which context parallel ranks gather."""
    model = step.model
    heads = max(1, model.query_groups // step.tensor_ranks)
    return step.micro_batch_size * model.seq_length * heads * 2 * model.kv_channels * step.element_bytes


def _gather(step: StepTraffic, reader: str) -> Iterator[Term]:
    """The input of a column parallel map: [c / T, b, h] of each rank to [c, b, h]."""
    if step.parallel.sequence_parallel:
        yield Term("tp", "all-gather", f"sequence gather in front of {reader}", step.hidden_bytes)


def _gather_gradient(step: StepTraffic, reader: str) -> Iterator[Term]:
    """Its gradient is a sum over the ranks; and the input, of which a shard was kept, is gathered once more."""
    yield from _gather(step, reader)
    yield from _sum(step, f"input gradient of {reader}")


def _sum(step: StepTraffic, purpose: str, message_bytes: int | None = None) -> Iterator[Term]:
    """A sum over the ranks, of [c, b, h] unless stated, of which sequence parallelism leaves each rank its part."""
    kind = "reduce-scatter" if step.parallel.sequence_parallel else "all-reduce"
    yield Term("tp", kind, purpose, message_bytes or step.hidden_bytes)


def _sum_gradient(step: StepTraffic, purpose: str, message_bytes: int | None = None) -> Iterator[Term]:
    """The gradient of a sum is the sum's, whole: each rank has it, or its part of the sequence."""
    if step.parallel.sequence_parallel:
        yield Term("tp", "all-gather", f"{purpose}, gradient", message_bytes or step.hidden_bytes)
