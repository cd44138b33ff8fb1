"""Memory of one layer, operation by operation: kept from forward to backward, and needed during backward.

Two implementations are described: the local layers, as torch runs them on a CPU (the simulation and the tests measure
them there), and Transformer Engine's, whose kernels fuse what the CPU does in passes.

Shapes: n tokens of a micro batch on one context parallel rank, n / T of them under sequence parallelism; h hidden size,
f inner size of the MLP, k rows of the FAN map, q, v and o the widths of queries, of values (as of keys) and of what QKV
makes, each of one tensor parallel rank where so named.
"""

import itertools
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

from megatron_fanformer.planning.job import Job

FLOAT = 4  # statistics, and what is computed in float32
FP8_BLOCK = 32  # numbers; with recipes of blocks a scale of one byte (mxfp8), or of four for 128, goes with them


class Operation(NamedTuple):
    """One operation of a layer's forward, in bytes."""

    name: str
    saved: int
    """Bytes kept from its forward to its backward."""
    backward: int
    """Bytes that exist only while its backward runs: incoming and outgoing gradients, the weight's, temporaries."""
    remade: int = 0
    """Bytes that are not kept, but recomputed before its backward, for it and for those before it."""
    freed: int = 0
    """Recomputed bytes that are freed after its backward."""


class Rise(NamedTuple):
    """Memory of a run of operations, in bytes."""

    saved: int
    """Bytes kept from forward to backward."""
    backward: int
    """Bytes beyond those, at the peak of its backward."""


def rise(operations: Iterable[Operation]) -> Rise:
    """Walk through the backward of a run of operations, whose forward is over."""
    operations = list(operations)
    saved = live = sum(operation.saved for operation in operations)
    peak = saved
    for operation in reversed(operations):
        live += operation.remade
        peak = max(peak, live + operation.backward)
        live -= operation.saved + operation.freed
    return Rise(saved, peak - saved)


class FANSizes(NamedTuple):
    """Sizes of a FAN layer's tensors, in bytes."""

    x_f: int
    """The first output, which QKV reads."""
    made: int
    """All outputs together."""
    kept_g: int
    """g in front of a GELU, which its backward needs."""
    own_pre: int
    """p | g of this rank's rows."""
    gathered_pre: int
    """p | g of all ranks' rows, where they are gathered."""
    temporaries: int
    """Temporaries of backward, where torch computes it in passes."""


class LayerShapes:
    """Sizes of a layer of one rank that its operations share."""

    def __init__(self, job: Job) -> None:
        model, parallel = job.model, job.parallel
        self.job, self.is_engine = job, job.layers == "transformer_engine"
        self.element, self.tensor = job.element_bytes, job.tensor_ranks
        self.tokens = job.tokens
        self.is_sharded = parallel.sequence_parallel
        self.part_tokens = job.tokens // self.tensor if self.is_sharded else job.tokens
        self.hidden, self.inner = model.hidden_size, model.ffn_hidden_size // self.tensor
        # Where query groups are fewer than ranks, each rank has one, and its own heads of that.
        groups = max(1, model.query_groups // self.tensor)
        self.heads = model.num_attention_heads // self.tensor
        self.queries, self.values = self.heads * model.kv_channels, groups * model.kv_channels
        self.qkv = model.qkv_rows // self.tensor
        self.is_column = parallel.fan_form == "column"
        self.fan_rows = model.fan_rows // self.tensor if self.is_column else model.fan_rows
        # Other layers give autograd a stand-in of the gradient's size; the Engine has one for all of a size.
        self.is_fused = self.is_engine and job.kernels.fuses_gradient_accumulation
        self.is_fp8 = self.is_engine and job.precision.fp8 is not None

    def whole(self, width: int) -> int:
        """Return the bytes of [n, width] in the type of activations."""
        return self.tokens * width * self.element

    def part(self, width: int) -> int:
        """Return the bytes of [n / T, width]: this rank's part of the sequence, under sequence parallelism."""
        return self.part_tokens * width * self.element

    def of_fan(self, width: int) -> int:
        """Return what FAN makes: of all tokens in the `column` form, of this rank's in the `sequence` form."""
        return self.whole(width) if self.is_column else self.part(width)

    @cached_property
    def stream(self) -> int:
        """The residual stream, or its gradient: [n / T, h]."""
        return self.part(self.hidden)

    @cached_property
    def gathered(self) -> int:
        """The stream of all ranks, where an operation of its own makes it."""
        return self.whole(self.hidden) if self.is_sharded else 0

    @property
    def product(self) -> int:
        """Return the bytes that QKV makes: of all ranks, where query groups are fewer than they."""
        return self.whole(self.qkv) * (self.tensor if self.job.model.query_groups < self.tensor else 1)

    @property
    def exchanged(self) -> int:
        """Return the bytes of queries, keys and values that context parallel ranks exchange the heads of."""
        return self.whole(self.queries + 2 * self.values)

    @property
    def product_bytes(self) -> int:
        """Return the bytes of a number that torch sums: float32, with the gradient and cos or sin copied for it."""
        if not self.job.on_cpu:
            return 0
        return (3 if self.element < FLOAT else 1) * FLOAT

    def statistics(self) -> int:
        """Return the bytes of a norm's statistics, one number a token."""
        return self.part_tokens * FLOAT

    def weight_gradient(self, rows: int, columns: int) -> int:
        """Return the bytes of a weight's gradient before it joins the float32 one; none where the product adds it."""
        return 0 if self.is_fused else rows * columns * self.element

    def column_parallel_backward(self, rows: int) -> int:
        """Return the bytes of the gradients of a column parallel map's output, input and weight.

        Under sequence parallelism the input is gathered once more, and of its gradient, a sum, a part is kept.
        """
        gradients = self.stream + self.whole(rows + self.hidden) + self.weight_gradient(rows, self.hidden)
        if self.is_sharded:
            gradients += self.stream + (self.gathered if self.is_engine else 0)  # the local layers have a buffer for it
        return gradients

    @cached_property
    def fan(self) -> FANSizes:
        """Sizes of what the FAN map and its activation make."""
        model = self.job.model
        outputs = model.fan.outputs(model.hidden_size, model.value_size)
        periodic = [int(p_ratio * width) for width, p_ratio in outputs]
        linear = sum(width for width, _ in outputs) - 2 * sum(periodic)
        tokens = self.tokens if self.is_column else self.part_tokens
        return FANSizes(
            x_f=self.of_fan(model.hidden_size),
            made=sum(self.of_fan(width) for width, _ in outputs),
            kept_g=self.of_fan(linear) if model.fan.activation == "gelu" else 0,
            own_pre=self.of_fan(self.fan_rows),
            gathered_pre=self.of_fan(model.fan_rows) if self.is_column and self.tensor > 1 else 0,
            temporaries=tokens * max(periodic) * self.product_bytes,
        )

    def fan_and_product(self, rows: int, *, is_recomputed: bool = False) -> tuple[int, int]:
        """Return what X_F and its product with so many rows of this rank keep, and what their backward holds besides.

        They are one function, the local layers' in the `column` form: `FANActivationAndProduct`.
        """
        fan = self.fan
        incoming = self.whole(rows) + fan.made - fan.x_f  # X_F's is the product's, made below
        grad_pre = fan.gathered_pre or fan.own_pre
        again = fan.made + fan.kept_g if is_recomputed else 0
        differentiated = fan.x_f + grad_pre + fan.temporaries + (fan.gathered_pre if is_recomputed else 0)
        summed = fan.own_pre + self.weight_gradient(rows, self.hidden)
        saved = fan.own_pre if is_recomputed else fan.made + fan.kept_g
        return saved, self.stream + incoming + again + max(differentiated, summed)

    def quantised(self, tokens: int, width: int) -> int:
        """Return one 8-bit copy, with its scales."""
        numbers = tokens * width
        has_blocks = self.job.precision.fp8_recipe in ("blockwise", "mxfp8")
        return numbers + (numbers // FP8_BLOCK if has_blocks else 0)

    def kept_input(self, tokens: int, width: int, *, is_fp8: bool) -> int:
        """Return the input that a linear map keeps for its weight's gradient."""
        return self.quantised(tokens, width) if is_fp8 else tokens * width * self.element


def layer_operations(job: Job) -> list[Operation]:
    """Return the operations of a layer, in the order of forward, as selective recomputation leaves them."""
    shapes = LayerShapes(job)
    return [*_before_attention(shapes), *_attention(shapes), *_mlp(shapes)]


def norm_backward(shapes: LayerShapes) -> int:
    """Return what a norm's backward holds beside the stream's gradient: two tensors; on a CPU one and copies."""
    width = shapes.part_tokens * shapes.hidden
    if shapes.is_engine or not shapes.job.on_cpu:
        return 2 * width * shapes.element
    return width * (shapes.element + (3 * FLOAT if shapes.element < FLOAT else 2 * FLOAT))


# -- what comes before attention


def _before_attention(shapes: LayerShapes) -> Iterator[Operation]:
    """Input norm, FAN map, X_F, and the product that reads it."""
    has_fan = shapes.job.model.has_fan
    second_copy = shapes.stream if _recomputes_input_norm(shapes) else 0  # beside the one that the map reads
    yield Operation(
        "input norm",
        saved=shapes.stream + (0 if second_copy else shapes.statistics()),
        backward=shapes.stream + norm_backward(shapes),
        freed=second_copy,
    )
    is_replicated = has_fan and not shapes.is_column
    rows = shapes.fan_rows if has_fan else shapes.qkv
    is_fp8 = shapes.is_fp8 and (shapes.job.precision.fp8_fan or not has_fan)
    yield Operation(
        "FAN map" if has_fan else "QKV",
        saved=0 if second_copy else shapes.kept_input(shapes.part_tokens, shapes.hidden, is_fp8=is_fp8),
        backward=shapes.part(rows) + 2 * shapes.stream + shapes.weight_gradient(rows, shapes.hidden)
        if is_replicated
        else shapes.column_parallel_backward(rows),
        freed=second_copy,
    )
    if not has_fan:
        return
    if shapes.is_column and not shapes.is_engine:
        both = shapes.fan_and_product(shapes.qkv, is_recomputed=shapes.job.parallel.recomputes("fan"))
        yield Operation("FAN and QKV", *both)
    else:
        yield from _fan_then_product(shapes)


def _recomputes_input_norm(shapes: LayerShapes) -> bool:
    return shapes.job.parallel.recomputes("layernorm") and not shapes.job.fuses_input_norm


def _fan_then_product(shapes: LayerShapes) -> Iterator[Operation]:
    """Return X_F, and after it the product, which keeps the same X_F.

    megatron-core holds what it computes again twice: as it is made, and where the first output was.
    """
    fan, is_recomputed = shapes.fan, shapes.job.parallel.recomputes("fan")
    again = fan.made + fan.kept_g if is_recomputed else 0
    grad_pre = fan.own_pre + fan.gathered_pre
    yield Operation(
        "FAN",
        saved=fan.own_pre if is_recomputed else fan.made + fan.kept_g,
        backward=shapes.stream + fan.made + grad_pre + fan.temporaries,
        freed=again,
    )
    gradients = shapes.whole(shapes.qkv + shapes.hidden) + fan.made - fan.x_f
    if not shapes.is_column:  # X_F is gathered along the sequence, and its gradient scattered
        gradients += fan.x_f + (shapes.gathered if shapes.is_engine else 0)
    yield Operation(
        "QKV",
        saved=_delayed_copy(shapes, shapes.tokens if shapes.is_column else shapes.part_tokens, shapes.hidden),
        backward=shapes.stream + gradients + shapes.weight_gradient(shapes.qkv, shapes.hidden),
        remade=again + fan.x_f if is_recomputed else 0,
        freed=fan.x_f if is_recomputed else 0,
    )


def _delayed_copy(shapes: LayerShapes, tokens: int, width: int) -> int:
    """Return the 8-bit copy of an input that is kept anyway: one whose scale comes from the past cannot be made
    again.
    """
    has_copy = shapes.is_fp8 and shapes.job.precision.fp8_recipe == "delayed"
    return shapes.quantised(tokens, width) if has_copy else 0


# -- attention


def _attention(shapes: LayerShapes) -> Iterator[Operation]:
    """Norms of heads, rotary embedding, core attention, and the map behind it."""
    job, stream, context = shapes.job, shapes.stream, shapes.whole(shapes.queries)
    if job.model.qk_layernorm:
        yield _head_norms(shapes)
    if job.parallel.exchanges_heads:  # backward: gradients of both sides, and a copy in the order of ranks
        yield Operation("exchange of heads", saved=0, backward=stream + 3 * shapes.exchanged)
    if not shapes.is_engine:  # cos and sin of each position, of queries and of keys
        positions = shapes.tokens // job.micro_batch_size
        if job.parallel.exchanges_heads:
            positions *= job.parallel.context_parallel_size
        yield Operation("rotary embedding", 2 * positions * job.model.kv_channels * shapes.element, 0)
    given, read, copies = _attention_inputs(shapes)
    # Of each row of scores the sum of its exponentials; or, without a fused kernel, the softmax of all scores.
    scores = shapes.whole(shapes.heads * job.model.seq_length) if job.keeps_scores else 0
    kept = scores or shapes.tokens * shapes.heads * FLOAT
    gradients = 2 * context + 2 * shapes.whole(shapes.values if shapes.is_engine else shapes.queries)
    if job.has_ring:
        # Two buffers, each of keys and values with their gradients, and the queries' gradient that steps add to. (In
        # forward there are less: a second buffer of keys and values, and two steps' outputs.)
        gradients += context + 2 * 2 * shapes.whole(2 * shapes.values)
    if job.gathers_twice:
        # Keys and values of all ranks with their gradients, and those of each of the rank's two chunks, as far as it
        # sees them.
        ranks, both = job.parallel.context_parallel_size, shapes.whole(2 * shapes.values)
        gradients += 2 * ranks * both + both * (2 * ranks + 1) // 2
    if job.parallel.exchanges_heads:
        copies += context  # of the heads: the map behind it keeps that of this rank's part of the sequence
    gradients += 2 * scores  # the softmax's, and from it the scores' own
    is_recomputed = job.parallel.recomputes("core_attn")
    yield Operation(
        "core attention",
        saved=given if is_recomputed else read + copies + kept,
        backward=stream + gradients + (copies + kept + context if is_recomputed else 0),
    )
    turned = context if not shapes.is_engine and job.micro_batch_size > 1 else 0  # its samples lie apart
    yield Operation(
        "attention output",
        saved=context + _delayed_copy(shapes, shapes.tokens, shapes.queries),
        backward=stream + shapes.gathered + context + turned + shapes.weight_gradient(shapes.hidden, shapes.queries),
        remade=2 * stream if _recomputes_input_norm(shapes) else 0,
    )


def _head_norms(shapes: LayerShapes) -> Operation:
    """Return the norms of queries and keys.

    The Engine's keep a copy of both. The local ones keep them where the product left them: all that it made, which
    attention may keep anyway, for the values in it; queries of several groups were copied out of it.
    """
    model, both = shapes.job.model, shapes.queries + shapes.values
    groups = shapes.values // model.kv_channels
    kept = shapes.tokens * (shapes.heads + groups) * FLOAT
    if shapes.is_engine:
        kept += shapes.whole(both)
    else:
        given, read, _ = _attention_inputs(shapes)
        is_product_kept = read == given or shapes.job.parallel.recomputes("core_attn")
        is_product_kept &= not shapes.job.parallel.exchanges_heads
        if model.placement.has_own_values or not is_product_kept:
            kept += shapes.product
        if shapes.heads > groups > 1:
            kept += shapes.whole(shapes.queries)
    return Operation("norms of heads", saved=kept, backward=shapes.stream + shapes.whole(2 * both))


def _attention_inputs(shapes: LayerShapes) -> tuple[int, int, int]:
    """Return what attention is given; what it keeps of that; and what it keeps of its own copies."""
    queries, keys = shapes.whole(shapes.queries), shapes.whole(shapes.values)
    values, is_view = shapes.job.model.placement.kept_values(shapes)
    if shapes.job.parallel.exchanges_heads:
        values, is_view = shapes.exchanged, True
    given = queries + keys + values
    if shapes.job.has_ring:  # whose first buffer is a copy of keys and values
        return given, queries, 2 * keys
    if shapes.is_engine:  # it copies values that are a view
        return (given, queries + keys, keys) if is_view else (given, given, 0)
    if shapes.job.parallel.context_parallel_size > 1 and not shapes.job.parallel.exchanges_heads:
        return given, queries, _whole_sequence(shapes)
    if shapes.queries > shapes.values:  # keys and values are repeated for the queries that share them
        return given, queries, 2 * queries
    return given, given, 0


def _whole_sequence(shapes: LayerShapes) -> int:
    """Return what local attention keeps under context parallelism, which goes through the rank's two chunks in turn.

    Keys and values of all ranks in order, or repeated as far as each chunk sees them; a mask for each chunk, the same
    for all samples and heads; and each chunk's output, beside the two together.
    """
    ranks = shapes.job.parallel.context_parallel_size
    chunk_tokens = shapes.job.model.seq_length // (2 * ranks)
    masks = chunk_tokens * chunk_tokens * (2 * ranks + 1) * shapes.element
    seen = ranks * shapes.whole(2 * shapes.values)
    if shapes.queries > shapes.values:
        seen = shapes.whole(2 * shapes.queries) * (2 * ranks + 1) // 2
    return seen + masks + shapes.whole(shapes.queries)


# -- the MLP


def _mlp(shapes: LayerShapes) -> list[Operation]:
    """Return norm, the map that reads it, and the rest. (The Engine's norm and its statistics are inside that map.)"""
    parallel, stream, placement = shapes.job.parallel, shapes.stream, shapes.job.model.placement
    norm = Operation(
        "pre-MLP norm",
        saved=stream + (0 if shapes.is_engine else shapes.statistics()),
        backward=stream + norm_backward(shapes),
    )
    first, *between, last = itertools.starmap(Operation, placement.mlp_operations(shapes))
    if parallel.recomputes("layernorm") and not shapes.is_engine:  # held twice again
        norm, first, last = (
            norm._replace(saved=stream, freed=stream),
            _made_again(first),
            last._replace(remade=2 * stream),
        )
    if parallel.recomputes("mlp"):
        made = 0 if placement.keeps_mlp_output else stream  # what the MLP makes, unless that is kept for backward
        remade = last.remade + sum(operation.saved for operation in between) + last.saved + made
        if shapes.is_engine:
            remade, first = remade + first.saved, _made_again(first)
        first = first._replace(freed=first.freed + made)
        between, last = [*map(_made_again, between)], _made_again(last)._replace(remade=remade)
    return [norm, first, *between, last]


def _made_again(operation: Operation) -> Operation:
    """Return the same, where what it kept is made again before its backward."""
    return operation._replace(saved=0, freed=operation.freed + operation.saved)
