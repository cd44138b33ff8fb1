"""What one layer keeps from forward to backward, and what its backward holds besides: operation by operation.

Two implementations are described: the local layers, as torch runs them on a CPU (the simulation and the tests measure
them there), and Transformer Engine's, whose kernels fuse what the CPU does in passes.

Shapes: n tokens of a micro batch on one context parallel rank, n / T of them under sequence parallelism; h hidden size,
f inner size of the MLP, k rows of the FAN map, q, v and o the widths of queries, of values (as of keys) and of what QKV
makes, each of one tensor parallel rank where so named.
"""

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
    """Kept from its forward to its backward."""
    backward: int
    """There only while its backward runs: gradients that come in and go out, the weight's, temporaries."""
    remade: int = 0
    """Not kept, but made again before its backward, for this operation or those before it."""
    freed: int = 0
    """Of what was remade, freed after its backward."""


class Rise(NamedTuple):
    """What a run of operations holds, in bytes."""

    saved: int
    """From forward to backward."""
    backward: int
    """Beyond that, at the fullest moment of its backward."""


def rise(operations: Iterable[Operation]) -> Rise:
    """Walks through a backward pass.

    A weight's gradient, a gradient of activations and what is recomputed come on top of what was kept, which is freed
    on the way.
    """
    operations = list(operations)
    saved = live = sum(operation.saved for operation in operations)
    fullest = saved
    for operation in reversed(operations):
        live += operation.remade
        fullest = max(fullest, live + operation.backward)
        live -= operation.saved + operation.freed
    return Rise(saved, fullest - saved)


class LayerShapes:
    """Sizes of a layer of one rank that its operations share."""

    def __init__(self, job: Job) -> None:
        model, parallel, step = job.model, job.parallel, job.traffic(0)
        self.job, self.is_engine = job, job.layers == "transformer_engine"
        self.element, self.tensor = job.element_bytes, step.tensor_ranks
        self.tokens = step.tokens
        self.is_sharded = parallel.sequence_parallel
        self.part_tokens = step.tokens // self.tensor if self.is_sharded else step.tokens
        self.hidden, self.inner = model.hidden_size, model.ffn_hidden_size // self.tensor
        # Where query groups are fewer than ranks, each rank has one, and its own heads of that.
        groups = max(1, model.query_groups // self.tensor)
        self.heads = model.num_attention_heads // self.tensor
        self.queries, self.values = self.heads * model.kv_channels, groups * model.kv_channels
        self.qkv = model.qkv_rows // self.tensor
        self.is_column = parallel.fan_form == "column"
        self.fan_rows = model.fan_rows // self.tensor if self.is_column else model.fan_rows
        self.is_fused = job.kernels.fuses_gradient_accumulation
        self.is_fp8 = self.is_engine and job.precision.fp8 is not None

    def whole(self, width: int) -> int:
        """[n, width] in the type of activations."""
        return self.tokens * width * self.element

    def part(self, width: int) -> int:
        """[n / T, width]: this rank's part of the sequence, under sequence parallelism."""
        return self.part_tokens * width * self.element

    def of_fan(self, width: int) -> int:
        """What FAN makes: of all tokens in the `column` form, of this rank's in the `sequence` form."""
        return self.whole(width) if self.is_column else self.part(width)

    @cached_property
    def stream(self) -> int:
        """The residual stream, or its gradient: [n / T, h]."""
        return self.part(self.hidden)

    @cached_property
    def gathered(self) -> int:
        """The stream of all ranks, where an operation of its own makes it."""
        return self.whole(self.hidden) if self.is_sharded else 0

    def statistics(self) -> int:
        """A norm's, one number a token."""
        return self.part_tokens * FLOAT

    def weight_gradient(self, rows: int, columns: int) -> int:
        """Before it is added to the float32 one; nothing where the product adds it."""
        return 0 if self.is_fused else rows * columns * self.element

    def quantised(self, tokens: int, width: int) -> int:
        """One 8-bit copy, with its scales."""
        numbers = tokens * width
        has_blocks = self.job.precision.fp8_recipe in ("blockwise", "mxfp8")
        return numbers + (numbers // FP8_BLOCK if has_blocks else 0)

    def kept_input(self, tokens: int, width: int, *, is_fp8: bool) -> int:
        """The input that a linear map keeps for its weight's gradient."""
        return self.quantised(tokens, width) if is_fp8 else tokens * width * self.element


def layer_operations(job: Job) -> list[Operation]:
    """The operations of a layer, in the order of forward, as selective recomputation leaves them."""
    shapes = LayerShapes(job)
    return [*_before_attention(shapes), *_attention(shapes), *_mlp(shapes)]


def norm_backward(shapes: LayerShapes) -> int:
    """What a norm's backward holds beside the stream's gradient: two of its own; on a CPU one, and float32 copies."""
    width = shapes.part_tokens * shapes.hidden
    if shapes.is_engine or not shapes.job.on_cpu:
        return 2 * width * shapes.element
    return width * (shapes.element + (3 * FLOAT if shapes.element < FLOAT else 2 * FLOAT))


# -- what comes before attention


def _before_attention(shapes: LayerShapes) -> Iterator[Operation]:
    """Input norm, FAN map, X_F, and the product that reads it."""
    job, stream = shapes.job, shapes.stream
    recomputes_norm = job.parallel.recomputes("layernorm") and not _has_fused_input_norm(shapes)
    freed_norm = stream if recomputes_norm else 0  # beside the copy that the map reads
    yield Operation("input norm", stream + shapes.statistics(), stream + norm_backward(shapes), freed=freed_norm)
    if not job.model.has_fan:
        yield _first_map(shapes, "QKV", shapes.qkv, freed_norm, is_fp8=shapes.is_fp8)
        return
    is_fp8 = shapes.is_fp8 and job.precision.fp8_fan
    yield _first_map(shapes, "FAN map", shapes.fan_rows, freed_norm, is_fp8=is_fp8)
    if shapes.is_column and not shapes.is_engine:
        yield _fan_with_product(shapes)
    else:
        yield from _fan_then_product(shapes)


def _has_fused_input_norm(shapes: LayerShapes) -> bool:
    return shapes.is_engine and (shapes.is_column or not shapes.job.model.has_fan)


def _first_map(shapes: LayerShapes, name: str, rows: int, freed: int, *, is_fp8: bool) -> Operation:
    """The map that reads the norm's output, which is kept for it (unless it is recomputed)."""
    kept = 0 if freed else shapes.kept_input(shapes.part_tokens, shapes.hidden, is_fp8=is_fp8)
    is_replicated = name == "FAN map" and not shapes.is_column
    gradients = shapes.of_fan(rows) + shapes.stream if is_replicated else shapes.whole(rows + shapes.hidden)
    if not is_replicated and shapes.is_sharded:  # its part, beside the whole that is scattered
        gradients += shapes.stream + (shapes.gathered if shapes.is_engine else 0)
    weight = shapes.weight_gradient(rows, shapes.hidden)
    return Operation(name, kept, shapes.stream + gradients + weight, freed=freed)


class _FAN(NamedTuple):
    """Sizes of a FAN layer's tensors, in bytes."""

    x_f: int
    """The first output, which QKV reads."""
    made: int
    """All outputs."""
    kept_g: int
    """g in front of a GELU, which its backward needs."""
    own_pre: int
    """p | g of this rank's rows."""
    gathered_pre: int
    """Of all ranks' rows, where they are gathered."""
    temporaries: int
    """Of backward, where torch computes it in passes."""


def _fan_sizes(shapes: LayerShapes) -> _FAN:
    model = shapes.job.model
    outputs = model.fan.outputs(model.hidden_size, model.value_size)
    periodic = [int(p_ratio * width) for width, p_ratio in outputs]
    linear = sum(width for width, _ in outputs) - 2 * sum(periodic)
    # Torch takes sums of products in float32, of gradients and cos or sin that it copies for that.
    floats = 0 if not shapes.job.on_cpu else 3 if shapes.element < FLOAT else 1
    tokens = shapes.tokens if shapes.is_column else shapes.part_tokens
    return _FAN(
        x_f=shapes.of_fan(model.hidden_size),
        made=sum(shapes.of_fan(width) for width, _ in outputs),
        kept_g=shapes.of_fan(linear) if model.fan.activation == "gelu" else 0,
        own_pre=shapes.of_fan(shapes.fan_rows),
        gathered_pre=shapes.of_fan(model.fan_rows) if shapes.is_column and shapes.tensor > 1 else 0,
        temporaries=tokens * max(periodic) * floats * FLOAT,
    )


def _fan_with_product(shapes: LayerShapes) -> Operation:
    """X_F and its product in one function, the local layers' in the `column` form: `FANActivationAndProduct`."""
    fan, is_recomputed = _fan_sizes(shapes), shapes.job.parallel.recomputes("fan")
    incoming = shapes.whole(shapes.qkv) + fan.made - fan.x_f
    grad_pre = fan.gathered_pre or fan.own_pre
    again = fan.made + fan.kept_g if is_recomputed else 0
    differentiated = fan.x_f + grad_pre + fan.temporaries + (fan.gathered_pre if is_recomputed else 0)
    summed = fan.own_pre + shapes.weight_gradient(shapes.qkv, shapes.hidden)
    return Operation(
        "FAN and QKV",
        saved=fan.own_pre if is_recomputed else fan.made + fan.kept_g,
        backward=shapes.stream + incoming + again + max(differentiated, summed),
    )


def _fan_then_product(shapes: LayerShapes) -> Iterator[Operation]:
    """X_F, and after it the product, which keeps the same X_F.

    megatron-core holds what it computes again twice: as it is made, and where the first output was.
    """
    fan, is_recomputed = _fan_sizes(shapes), shapes.job.parallel.recomputes("fan")
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
    """The 8-bit copy of an input that is kept anyway: one whose scale comes from the past cannot be made again."""
    has_copy = shapes.is_fp8 and shapes.job.precision.fp8_recipe == "delayed"
    return shapes.quantised(tokens, width) if has_copy else 0


# -- attention


def _attention(shapes: LayerShapes) -> Iterator[Operation]:
    job, stream = shapes.job, shapes.stream
    recomputes_norm = job.parallel.recomputes("layernorm") and not _has_fused_input_norm(shapes)
    recomputes_core = job.parallel.recomputes("core_attn")
    if not shapes.is_engine:  # cos and sin of each position, of queries and of keys
        positions = shapes.tokens // job.micro_batch_size
        yield Operation("rotary embedding", 2 * positions * job.model.kv_channels * shapes.element, 0)
    inputs, copies = _attention_inputs(shapes)
    context = shapes.whole(shapes.queries)
    exponents = shapes.tokens * shapes.heads * FLOAT
    gradients = context + shapes.whole(shapes.queries) + 2 * shapes.whole(_key_width(shapes))
    if recomputes_core:
        again = copies + exponents + context
        yield Operation("core attention", inputs, stream + gradients + again)
    else:
        kept = copies + _kept_beside_copies(shapes, inputs) if copies else inputs
        yield Operation("core attention", kept + exponents, stream + gradients)
    copy = _delayed_copy(shapes, shapes.tokens, shapes.queries)
    turned = context if not shapes.is_engine and job.micro_batch_size > 1 else 0  # its samples lie apart
    backward = stream + shapes.gathered + context + turned + shapes.weight_gradient(shapes.hidden, shapes.queries)
    yield Operation("attention output", context + copy, backward, remade=2 * stream if recomputes_norm else 0)


def _key_width(shapes: LayerShapes) -> int:
    """Of the keys that attention reads: the local one repeats those that several queries share."""
    return shapes.values if shapes.is_engine else shapes.queries


def _attention_inputs(shapes: LayerShapes) -> tuple[int, int]:
    """Rotated queries and keys, and values; and the copies that attention itself makes of them.

    Values are a view of what QKV made, of which they keep all, unless a FAN layer makes them.
    """
    model, job = shapes.job.model, shapes.job
    rotated = shapes.whole(shapes.queries + shapes.values)
    if model.fan.placement != "qk_and_v":
        own = shapes.whole(_made_by_qkv(shapes))
    elif not shapes.is_column or job.parallel.recomputes("fan"):
        own = shapes.whole(shapes.values) if shapes.tensor > 1 or job.parallel.recomputes("fan") else 0
    else:
        own = 0  # a view of FAN's output, which FAN keeps
    copies = 0
    if job.parallel.context_parallel_size > 1 and not shapes.is_engine:
        copies = _whole_sequence(shapes)
    elif shapes.is_engine:
        copies = shapes.whole(shapes.values)  # values, on their own
    elif shapes.queries > shapes.values:
        copies = 2 * shapes.whole(shapes.queries)
    return rotated + own, copies


def _made_by_qkv(shapes: LayerShapes) -> int:
    """Width of the tensor whose view the values are: of all ranks, where query groups are fewer than they."""
    is_gathered = shapes.job.model.query_groups < shapes.tensor
    return shapes.qkv * (shapes.tensor if is_gathered else 1)


def _kept_beside_copies(shapes: LayerShapes, inputs: int) -> int:
    """Of the inputs, where copies took the place of others: queries, and keys unless they were copied, too."""
    if shapes.is_engine:
        return shapes.whole(shapes.queries + shapes.values)
    return shapes.whole(shapes.queries)


def _whole_sequence(shapes: LayerShapes) -> int:
    """Keys and values of all context parallel ranks in order, and the masks of this rank's two chunks."""
    job = shapes.job
    ranks = job.parallel.context_parallel_size
    length = job.model.seq_length // (2 * ranks)
    masks = length * length * (2 * ranks + 1) * shapes.element  # one for all samples and heads
    gathered = ranks * shapes.whole(2 * shapes.values)
    context = shapes.whole(shapes.queries)  # of each chunk, beside the two together
    if shapes.queries > shapes.values:  # what each chunk sees, repeated
        seen = shapes.whole(2 * shapes.queries) * (2 * ranks + 1) // 2
        return seen + masks + context
    return gathered + masks + context


# -- the MLP


def _mlp(shapes: LayerShapes) -> Iterator[Operation]:
    job, stream, inner = shapes.job, shapes.stream, shapes.inner
    is_recomputed = job.parallel.recomputes("mlp")
    recomputes_norm = job.parallel.recomputes("layernorm") and not shapes.is_engine
    normed = shapes.kept_input(shapes.part_tokens, shapes.hidden, is_fp8=shapes.is_fp8)
    gate_and_up = shapes.whole(2 * inner)
    activated = shapes.kept_input(shapes.tokens, inner, is_fp8=shapes.is_fp8)
    again = gate_and_up + activated + stream if is_recomputed else 0  # and what the MLP made, once more
    if is_recomputed and shapes.is_engine:
        again += normed + shapes.statistics()  # the norm is inside the first map
    second_copy = stream if recomputes_norm else 0
    remade = again + 2 * second_copy

    kept_normed = 0 if recomputes_norm or (is_recomputed and shapes.is_engine) else normed
    statistics = 0 if is_recomputed and shapes.is_engine else shapes.statistics()
    yield Operation("pre-MLP norm", stream + statistics, stream + norm_backward(shapes), freed=second_copy)
    first = stream + gate_and_up + shapes.whole(shapes.hidden)
    if shapes.is_sharded:
        first += stream + (shapes.gathered if shapes.is_engine else 0)
    first += shapes.weight_gradient(2 * inner, shapes.hidden)
    if shapes.is_fp8:
        first += 2 * shapes.quantised(shapes.tokens, 2 * inner)
    freed = second_copy + (stream if is_recomputed else 0)
    if is_recomputed and shapes.is_engine:
        freed += normed + shapes.statistics()
    yield Operation("first map of the MLP", kept_normed, first, freed=freed)
    yield Operation(
        "SwiGLU",
        0 if is_recomputed else gate_and_up,
        stream + shapes.whole(3 * inner),
        freed=gate_and_up if is_recomputed else 0,
    )
    second = stream + shapes.gathered + shapes.whole(inner) + shapes.weight_gradient(shapes.hidden, inner)
    if shapes.is_fp8:
        second += 2 * shapes.quantised(shapes.tokens, shapes.hidden)
    yield Operation(
        "second map of the MLP",
        0 if is_recomputed else activated,
        second,
        remade=remade,
        freed=activated if is_recomputed else 0,
    )
