"""Communication of one micro batch through a chunk of layers: forward, backward and recomputation.

Column parallel maps read an input that all tensor parallel ranks need, row parallel maps make one that is a sum over
them; sequence parallelism shards both along the sequence. Everything else is explained below.
"""

from collections.abc import Iterator
from typing import NamedTuple

from megatron_fanformer.plan.gradient_buffers import Chunk
from megatron_fanformer.plan.job import Job

LOGIT_STATISTIC_BYTES = 4  # the cross entropy is computed in float32
ROW_OUTPUT = "row-parallel output"
PRE_ACTIVATION = "FAN pre-activation"


class Term(NamedTuple):
    """Collectives of one purpose."""

    group: str
    kind: str
    purpose: str
    message_bytes: int
    """Bytes of all calls together."""
    calls: int = 1

    def times(self, number: int) -> "Term":
        """Return the same, that many times over."""
        return self._replace(message_bytes=self.message_bytes * number, calls=self.calls * number)

    def again(self) -> "Term":
        """Return the same, because backward runs a part of forward again."""
        return self._replace(purpose=f"{self.purpose}, recomputed")


def chunk_terms(job: Job, chunk: Chunk) -> Iterator[Term]:
    """Yield the terms of one micro batch through one chunk, both ways."""
    if chunk.has_embedding:
        yield from embedding_terms(job)
    for term in (*layer_forward(job), *layer_backward(job)):
        yield term.times(chunk.layers)
    for term in recomputed(job):
        yield term.again().times(recomputed_layers(job, chunk.layers))
    if chunk.has_head:
        yield from head_terms(job)


def embedding_terms(job: Job) -> Iterator[Term]:
    """Yield the terms of the embedding, both ways: each rank looks up its part of the vocabulary; the parts are
    summed.
    """
    yield from (*_sum(job, "embedding"), *_sum_gradient(job, "embedding"))


def head_terms(job: Job) -> Iterator[Term]:
    """Yield the terms of the loss head, both ways."""
    yield from _gather(job, "the head")
    # Of each token: its largest logit, its label's and the sum of exponentials, each of a shard of the vocabulary.
    statistics = Term("tp", "all-reduce", "vocabulary cross entropy", job.tokens * LOGIT_STATISTIC_BYTES).times(3)
    if job.kernels.chunked_loss_head:
        # The last two are summed together, of a chunk of tokens at a time. The gradient is taken while the whole input
        # is still there.
        yield statistics._replace(calls=2 * job.loss_chunks)
        yield from _sum(job, "input gradient of the head")
    else:
        yield statistics
        yield from _gather_gradient(job, "the head")


def layer_forward(job: Job) -> Iterator[Term]:
    """Yield the terms of one layer's forward."""
    yield from _gather(job, _first_map(job))
    for kind, _, purpose, message_bytes in _before_heads(job):
        yield Term("tp", kind, purpose, message_bytes)
    yield from _heads_of_own_part(job)
    yield from _core_attention_forward(job)
    yield from _sum(job, ROW_OUTPUT)
    yield from _mlp_forward(job)


def _mlp_forward(job: Job) -> Iterator[Term]:
    yield from _gather(job, "the MLP")
    yield from _mlp_pre_activation(job, "all-gather")
    yield from _sum(job, ROW_OUTPUT, _ffn_output_bytes(job))


def _mlp_pre_activation(job: Job, kind: str) -> Iterator[Term]:
    if rows := job.model.placement.exchanged_mlp_rows(job.model):
        yield Term("tp", kind, PRE_ACTIVATION, job.activation_bytes * rows)


def _heads_of_own_part(job: Job) -> Iterator[Term]:
    """Yield what becomes of queries, keys and values of a part of the sequence, [c, b, (n + 2 g) / T, d]: where ranks
    exchange heads, those of the whole, with a part of the heads. Their gradients go back.
    """
    if job.parallel.exchanges_heads:
        heads = job.model.num_attention_heads + 2 * job.model.query_groups
        yield Term("cp", "all-to-all", "heads of queries, keys and values", _heads_bytes(job, heads))


def _core_attention_forward(job: Job) -> Iterator[Term]:
    if job.parallel.exchanges_heads:
        yield Term("cp", "all-to-all", "heads of the context", _heads_bytes(job, job.model.num_attention_heads))
    else:
        yield Term("cp", "all-gather", "keys and values", _keys_and_values_bytes(job))


def _core_attention_backward(job: Job) -> Iterator[Term]:
    if job.parallel.exchanges_heads:
        yield from _core_attention_forward(job)
    else:
        if job.gathers_twice:
            yield from _core_attention_forward(job)
        yield Term("cp", "reduce-scatter", "keys and values", _keys_and_values_bytes(job))


def layer_backward(job: Job) -> Iterator[Term]:
    """Yield the terms of one layer's backward, without what it recomputes."""
    yield from _gather_gradient(job, _first_map(job))
    for _, kind, purpose, message_bytes in _before_heads(job):
        yield Term("tp", kind, purpose, message_bytes)
    yield from _heads_of_own_part(job)
    yield from _core_attention_backward(job)
    yield from _sum_gradient(job, ROW_OUTPUT)
    yield from _gather_gradient(job, "the MLP")
    yield from _mlp_pre_activation(job, "reduce-scatter")
    yield from _sum_gradient(job, ROW_OUTPUT, _ffn_output_bytes(job))


def recomputed(job: Job) -> Iterator[Term]:
    """Return what of a layer's forward runs again; the norms, which may be named too, communicate nothing."""
    if job.parallel.recompute_granularity == "full":
        yield from layer_forward(job)
    if job.parallel.recomputes("fan") and job.has_column_fan:
        yield Term("tp", "all-gather", PRE_ACTIVATION, _pre_activation_bytes(job))
    if job.parallel.recomputes("core_attn"):
        yield from _core_attention_forward(job)
    if job.parallel.recomputes("mlp"):
        yield from _mlp_forward(job)


def recomputed_layers(job: Job, layers: int) -> int:
    """Return how many of so many layers are recomputed: all of a chunk, or with method `block` the first few."""
    return min(layers, job.parallel.recompute_num_layers or 0) if job.parallel.recompute_method == "block" else layers


def _first_map(job: Job) -> str:
    """Return the map that reads the layer's input and needs it on all ranks (of X_F, in the `sequence` form)."""
    return "FAN" if job.has_column_fan else "QKV"


def _before_heads(job: Job) -> Iterator[tuple[str, str, str, int]]:
    """Kind in forward, kind in backward, purpose and bytes of what tensor parallel ranks exchange for their heads."""
    model = job.model
    if job.has_column_fan:
        # p | g of all ranks, k wide, in place of X_F; QKV, whose input is then whole, neither gathers nor sums.
        yield "all-gather", "reduce-scatter", PRE_ACTIVATION, _pre_activation_bytes(job)
    elif width := model.placement.exchanged_values(model):
        # A rank made all values of its part of the sequence, [c / T, b, v], and needs its own heads' of the whole.
        values_bytes = job.activation_bytes // job.tensor_ranks * width
        yield "all-to-all", "all-to-all", "values, from tokens to heads", values_bytes
    if model.query_groups < job.tensor_ranks:
        # Megatron gathers the whole output of QKV, and each rank takes its own heads out of it.
        yield "all-gather", "reduce-scatter", "QKV of shared groups", job.activation_bytes * model.qkv_rows


def _pre_activation_bytes(job: Job) -> int:
    """Return bytes of p | g of all ranks, [c, b, k]."""
    return job.activation_bytes * job.model.fan_rows


def _ffn_output_bytes(job: Job) -> int:
    """Return bytes of what the MLP's second map makes, [c, b, h]; of its p | g, where it is a FAN layer's."""
    _, (rows, _) = job.model.ffn_maps
    return job.activation_bytes * rows


def _heads_bytes(job: Job, heads: int) -> int:
    """Return bytes of so many heads of all tensor parallel ranks, of one rank's: [c, b, heads / T, d]."""
    return job.activation_bytes * heads // job.tensor_ranks * job.model.kv_channels


def _keys_and_values_bytes(job: Job) -> int:
    """Return bytes of the whole sequence's, of one rank's heads: [s, b, heads, 2 d], which context parallel ranks
    gather.
    """
    model = job.model
    heads = max(1, model.query_groups // job.tensor_ranks)
    return job.micro_batch_size * model.seq_length * heads * 2 * model.kv_channels * job.element_bytes


def _gather(job: Job, reader: str) -> Iterator[Term]:
    """Yield the input of a column parallel map: [c / T, b, h] of each rank to [c, b, h]."""
    if job.parallel.sequence_parallel:
        yield Term("tp", "all-gather", f"sequence gather in front of {reader}", job.hidden_bytes)


def _gather_gradient(job: Job, reader: str) -> Iterator[Term]:
    """Yield the gradient's sum over the ranks, and the gather of the input, of which only a shard was kept."""
    yield from _gather(job, reader)
    yield from _sum(job, f"input gradient of {reader}")


def _sum(job: Job, purpose: str, message_bytes: int | None = None) -> Iterator[Term]:
    """Yield a sum over the ranks, of [c, b, h] unless stated; under sequence parallelism each rank keeps its part."""
    kind = "reduce-scatter" if job.parallel.sequence_parallel else "all-reduce"
    yield Term("tp", kind, purpose, message_bytes or job.hidden_bytes)


def _sum_gradient(job: Job, purpose: str, message_bytes: int | None = None) -> Iterator[Term]:
    """Yield the gradient of a sum: the sum's own, whole; each rank has it, or its part of the sequence."""
    if job.parallel.sequence_parallel:
        yield Term("tp", "all-gather", f"{purpose}, gradient", message_bytes or job.hidden_bytes)
