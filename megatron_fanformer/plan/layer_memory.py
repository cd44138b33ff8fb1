"""The memory of one layer, of the loss head and of the embedding: kept for backward, and needed during backward.

Two implementations are described: the local layers, as torch runs them on a CPU (tests measure them there), and
Transformer Engine's, whose kernels fuse what the CPU does in several passes.

Shapes: n tokens of a micro batch on one context parallel rank; under sequence parallelism each of the T tensor parallel
ranks holds n / T of them. A FAN map gives p | g, of which the FAN layer makes the features [cos p, sin p, g]; those
before QKV are X_F.
"""

from collections.abc import Iterator
from typing import NamedTuple

from megatron_fanformer.plan.job import Job

FLOAT = 4  # bytes of a number in float32, in which norms and softmax keep their statistics
FP8_BLOCK = 32  # numbers for each byte of scales: mxfp8 has a byte for 32 numbers, blockwise four bytes for 128
ID_BYTES = 8  # one int64


class Rise(NamedTuple):
    """Bytes that an operation, or a sequence of operations, adds."""

    saved: int  # kept from forward to backward
    backward: int  # beside `saved`, at the peak of backward: gradients of inputs, outputs and weight, temporaries


class LayerShapes:
    """Sizes of a layer on one rank that several operations need: numbers and widths, or bytes where stated."""

    def __init__(self, job: Job) -> None:
        model, parallel = job.model, job.parallel
        self.job, self.is_engine = job, job.layers == "transformer_engine"
        self.element, self.tensor, self.tokens = job.element_bytes, job.tensor_ranks, job.tokens  # `element` in bytes
        self.is_sharded = parallel.sequence_parallel  # whether tensor parallel ranks share the stream's tokens
        self.part_tokens = job.tokens // self.tensor if self.is_sharded else job.tokens
        self.hidden, self.inner = model.hidden_size, model.ffn_hidden_size // self.tensor
        # If there are fewer query groups than ranks, each rank has one group, and some of that group's heads.
        self.groups = max(1, model.query_groups // self.tensor)
        self.heads = model.num_attention_heads // self.tensor
        self.queries, self.values = self.heads * model.kv_channels, self.groups * model.kv_channels
        self.qkv = model.qkv_rows // self.tensor
        self.is_column = parallel.fan_form == "column"
        self.fan_rows = model.fan_rows // self.tensor if self.is_column else model.fan_rows
        self.columns = model.padded_vocab_size // self.tensor  # of the logits
        # Whether a weight gradient needs no memory here: the product adds it to the float32 sum, and autograd gets a
        # dummy, which the Engine has once for all weights of a shape. The local layers have a dummy for each weight.
        self.is_fused = self.is_engine and bool(job.kernels.gradient_accumulation_fusion)
        self.is_fp8 = self.is_engine and job.precision.fp8 is not None
        self.stream = self.part(self.hidden)  # bytes of the residual stream, or of its gradient
        self.gathered = self.whole(self.hidden) if self.is_sharded else 0  # bytes of the stream of all ranks
        self.vocabulary_weight = self.columns * self.hidden * self.element  # bytes
        self.statistics = self.part_tokens * FLOAT  # bytes, of a norm

    def whole(self, width: int) -> int:
        """Return the bytes of [n, width] in the type of activations."""
        return self.tokens * width * self.element

    def part(self, width: int) -> int:
        """Return the bytes of [n / T, width]: this rank's part of the sequence, under sequence parallelism."""
        return self.part_tokens * width * self.element

    def fan_bytes(self, width: int) -> int:
        """Return the bytes of a FAN output `width` wide: of all tokens in the `column` form, else of this rank's."""
        return self.whole(width) if self.is_column else self.part(width)

    def gelu_input_width(self, width: int, p_ratio: float) -> int:
        """Return the width of g in a FAN layer of `width` features, if a GELU reads g and so keeps it; otherwise 0."""
        return width - 2 * int(p_ratio * width) if self.job.model.fan.activation == "gelu" else 0

    def weight_gradient(self, rows: int, columns: int) -> int:
        """Return the bytes of a new weight gradient before it is added to the float32 sum; 0 if the product adds it."""
        return 0 if self.is_fused else rows * columns * self.element

    def fp8_bytes(self, tokens: int, width: int) -> int:
        """Return the bytes of an 8-bit copy of [tokens, width], with its scales."""
        numbers = tokens * width
        has_blocks = self.job.precision.fp8_recipe in ("blockwise", "mxfp8")
        return numbers + (numbers // FP8_BLOCK if has_blocks else 0)

    def kept_input(self, tokens: int, width: int, *, is_fp8: bool) -> int:
        """Return the bytes of the input, [tokens, width], that a linear map keeps for its weight's gradient."""
        return self.fp8_bytes(tokens, width) if is_fp8 else tokens * width * self.element

    def delayed_copy(self, tokens: int, width: int) -> int:
        """Return the bytes of the 8-bit copy that the recipe `delayed` keeps beside an input; 0 with other recipes."""
        has_copy = self.is_fp8 and self.job.precision.fp8_recipe == "delayed"
        return self.fp8_bytes(tokens, width) if has_copy else 0


def layer_memory(job: Job) -> Rise:
    """Return the memory of a layer, without tensors that are recomputed selectively.

    Backward begins in the MLP, and peaks there or in core attention, once all saved after core attention is freed.
    """
    shapes = LayerShapes(job)
    mlp, attention = _mlp(shapes), core_attention(shapes)
    context = shapes.whole(shapes.queries) + shapes.delayed_copy(shapes.tokens, shapes.queries)  # attention's output
    saved = _before_attention(shapes) + attention.saved + context + mlp.saved
    return Rise(saved, max(mlp.backward, attention.backward - mlp.saved - context))


def _before_attention(shapes: LayerShapes) -> int:
    """Return the bytes that all operations from the input norm to the norms of heads keep for backward."""
    job, model = shapes.job, shapes.job.model
    is_fp8 = shapes.is_fp8 and (job.precision.fp8_fan or not model.has_fan)  # whether the map after the norm is in FP8
    kept = shapes.stream  # the norm's input
    if job.fuses_input_norm or not job.parallel.recomputes("layernorm"):
        kept += shapes.statistics + shapes.kept_input(shapes.part_tokens, shapes.hidden, is_fp8=is_fp8)
    if model.has_fan and job.parallel.recomputes("fan"):  # keeps p | g of this rank's rows in place of X_F
        kept += shapes.fan_bytes(shapes.fan_rows)
    elif model.has_fan:
        for width, p_ratio in model.fan.outputs(model.hidden_size, model.value_size):
            kept += shapes.fan_bytes(width + shapes.gelu_input_width(width, p_ratio))
    if model.has_fan:  # QKV's 8-bit copy of X_F
        x_f_tokens = shapes.tokens if shapes.is_column else shapes.part_tokens
        kept += shapes.delayed_copy(x_f_tokens, shapes.hidden)
    if model.qk_layernorm:  # these norms keep queries and keys (as wide as values), and a statistic for each head
        kept += shapes.whole(shapes.queries + shapes.values) + shapes.tokens * (shapes.heads + shapes.groups) * FLOAT
    return kept


def core_attention(shapes: LayerShapes) -> Rise:
    """Return the memory of rotary embedding and core attention."""
    job, context = shapes.job, shapes.whole(shapes.queries)
    inputs, kept_inputs, copies = _attention_inputs(shapes)
    # A fused kernel keeps one number for each row of scores, the sum of exponentials; plain products keep the softmax.
    scores = shapes.whole(shapes.heads * job.model.seq_length) if job.keeps_scores else 0
    kept = scores if job.keeps_scores else shapes.tokens * shapes.heads * FLOAT
    gradients = 2 * context + 2 * scores  # of the context and of queries; of the softmax and of the scores
    gradients += 2 * shapes.whole(shapes.values if shapes.is_engine else shapes.queries)  # of keys and of values
    ranks, keys_and_values = job.parallel.context_parallel_size, shapes.whole(2 * shapes.values)
    if job.has_ring:  # two buffers of keys and values with their gradients; the sum of the queries' gradients
        gradients += context + 2 * 2 * keys_and_values
    if job.gathers_twice:
        # Keys and values of all ranks with their gradients; and once more the gradients of those keys and values that
        # the first and the second of the rank's two chunks see: together 2 * ranks + 1 chunks, each half a rank's.
        gradients += 2 * ranks * keys_and_values + keys_and_values * (2 * ranks + 1) // 2
    if job.parallel.exchanges_heads:
        copies += context  # of this rank's heads; the map after the exchange keeps the context of this rank's tokens
    if job.parallel.recomputes("core_attn"):  # backward makes the copies, `kept` and the context again
        return Rise(inputs, shapes.stream + gradients + copies + kept + context)
    return Rise(kept_inputs + copies + kept, shapes.stream + gradients)


def _attention_inputs(shapes: LayerShapes) -> tuple[int, int, int]:
    """Return the bytes of core attention's inputs, of those inputs that it keeps, and of copies that it also keeps."""
    job, queries, keys = shapes.job, shapes.whole(shapes.queries), shapes.whole(shapes.values)
    values, is_view = _kept_values(shapes)
    inputs = queries + keys + values
    if job.has_ring:  # the first buffer is a copy of keys and values
        return inputs, queries, 2 * keys
    if shapes.is_engine:  # it copies values, which are as large as keys, if they are a view
        return (inputs, queries + keys, keys) if is_view else (inputs, inputs, 0)
    ranks, is_grouped = job.parallel.context_parallel_size, shapes.queries > shapes.values
    if ranks > 1 and not job.parallel.exchanges_heads:
        # Local attention computes the rank's two chunks one after the other. It keeps the output of each chunk beside
        # their joined output, and all ranks' keys and values. If queries are grouped, it keeps instead the keys and
        # values that each chunk sees (2 * ranks + 1 halves), repeated for the heads of a group: as wide as queries.
        visible = 2 * queries * (2 * ranks + 1) // 2 if is_grouped else ranks * 2 * keys
        return inputs, queries, visible + queries
    return (inputs, queries, 2 * queries) if is_grouped else (inputs, inputs, 0)  # repeated keys and values


def _kept_values(shapes: LayerShapes) -> tuple[int, bool]:
    """Return the bytes of the tensor that holds the values (0 if counted as FAN's output), and whether they view it."""
    if shapes.job.parallel.exchanges_heads:  # the exchange returns queries, keys and values in one tensor
        return shapes.whole(shapes.queries + 2 * shapes.values), True
    if not shapes.job.model.placement.has_own_values:
        # The tensor is QKV's output. With fewer query groups than ranks, it is gathered from all ranks.
        gathered_ranks = shapes.tensor if shapes.job.model.query_groups < shapes.tensor else 1
        return gathered_ranks * shapes.whole(shapes.qkv), True
    if shapes.job.parallel.recomputes("fan") or not shapes.is_column:
        return shapes.whole(shapes.values), False  # a clone, or (form `sequence`) exchanged: of this rank's heads alone
    return 0, shapes.tensor > 1  # every rank has FAN's values of all heads, and uses a view of those of its heads


def _mlp(shapes: LayerShapes) -> Rise:
    """Return the memory of the MLP and of the norm before it, which the Engine fuses into the first map."""
    parallel, has_fan_mlp = shapes.job.parallel, shapes.job.model.placement.has_fan_mlp
    norm_saved = shapes.stream + (0 if shapes.is_engine else shapes.statistics)
    operations = list(_fan_mlp(shapes) if has_fan_mlp else _swiglu_mlp(shapes))
    norm_output, saved_by_all = operations[0].saved, sum(operation.saved for operation in operations)
    freed = working = 0  # `working`: the most that backward adds to all that is saved
    for saved, backward in reversed(operations):  # backward of an operation frees what the operation saved
        working = max(working, backward - freed)
        freed += saved
    kept = saved_by_all
    if parallel.recomputes("mlp"):  # from the norm's output or, if the Engine fuses the norm, from the norm's input
        kept = 0 if shapes.is_engine else norm_output
    if parallel.recomputes("layernorm") and not shapes.is_engine:
        norm_saved, kept = shapes.stream, kept - norm_output
    recomputed = saved_by_all - kept
    if parallel.recomputes("mlp") and not has_fan_mlp:
        recomputed += shapes.stream  # the MLP's output, which a FAN MLP has among `saved`, since its backward reads it
    # The norm's backward, once `kept` is freed, holds gradients of input and output; on a CPU one, and float32 tensors.
    number_bytes = 2 * shapes.element
    if shapes.job.on_cpu and not shapes.is_engine:
        number_bytes = shapes.element + (3 if shapes.element < FLOAT else 2) * FLOAT  # 3: with a copy of the input
    norm_backward = shapes.stream + shapes.part_tokens * shapes.hidden * number_bytes
    return Rise(norm_saved + kept, max(recomputed + working, norm_backward - kept))


def _swiglu_mlp(shapes: LayerShapes) -> Iterator[Rise]:
    """Yield the memory of the first map, of SwiGLU, and of the second map."""
    stream, inner = shapes.stream, shapes.inner
    yield _first_map(shapes, 2 * inner)
    yield Rise(saved=shapes.whole(2 * inner), backward=stream + shapes.whole(3 * inner))  # gate, up, output
    output_gradient_copies = 2 * shapes.fp8_bytes(shapes.tokens, shapes.hidden) if shapes.is_fp8 else 0
    gradients = shapes.gathered + shapes.whole(inner) + shapes.weight_gradient(shapes.hidden, inner)
    second_map_input = shapes.kept_input(shapes.tokens, inner, is_fp8=shapes.is_fp8)
    yield Rise(saved=second_map_input, backward=stream + gradients + output_gradient_copies)


def _fan_mlp(shapes: LayerShapes) -> Iterator[Rise]:
    """Yield the memory of two FAN layers: of the first map, the first features, the second map, the second features.

    A FAN layer keeps its features, which the next operation reads, and g if a GELU reads g.
    """
    stream, inner, hidden = shapes.stream, shapes.inner, shapes.hidden
    (rows, _), (rows_2, _) = shapes.job.model.ffn_maps
    rows //= shapes.tensor
    p_ratio = shapes.job.model.fan.p_ratio
    yield _first_map(shapes, rows)
    features = shapes.whole(inner + shapes.gelu_input_width(inner, p_ratio))
    yield Rise(saved=features, backward=stream + shapes.whole(inner + rows))
    output_gradients = shapes.part(rows_2) + (shapes.whole(rows_2) if shapes.is_sharded else 0)  # one is gathered
    gradients = output_gradients + shapes.whole(inner) + shapes.weight_gradient(rows_2, inner)
    yield Rise(saved=0, backward=stream + gradients)
    features_2 = stream + shapes.part(shapes.gelu_input_width(hidden, p_ratio))
    yield Rise(saved=features_2, backward=stream + shapes.part(rows_2))


def _first_map(shapes: LayerShapes, rows: int) -> Rise:
    """Return the memory of the MLP's first map, with `rows` rows on this rank. The map keeps the norm's output.

    Under sequence parallelism backward gathers the input again, and keeps this rank's part of the input gradients' sum.
    """
    saved = shapes.kept_input(shapes.part_tokens, shapes.hidden, is_fp8=shapes.is_fp8)
    gradients = shapes.stream + shapes.whole(rows + shapes.hidden) + shapes.weight_gradient(rows, shapes.hidden)
    if shapes.is_sharded:
        gradients += shapes.stream + (shapes.gathered if shapes.is_engine else 0)  # the local layers have a buffer
    output_gradient_copies = 2 * shapes.fp8_bytes(shapes.tokens, rows) if shapes.is_fp8 else 0
    return Rise(saved + (shapes.statistics if shapes.is_engine else 0), gradients + output_gradient_copies)


# -- the model's ends


def loss_head(shapes: LayerShapes) -> Rise:
    """Return the memory of the final norm and the loss head.

    The final norm keeps `saved`; `backward` is the most that the head holds beside it, in forward or in backward.
    """
    job, element, hidden, columns = shapes.job, shapes.element, shapes.hidden, shapes.columns
    saved = shapes.stream + shapes.statistics
    if not job.kernels.chunked_loss_head:
        # Megatron's head holds the logits of all tokens, and a float32 copy if they are narrower. The softmax, and
        # then the gradient, overwrites float32 logits. Products take the gradient in the format of the logits.
        logits = shapes.whole(columns)
        softmax_beside_logits = shapes.tokens * columns * FLOAT + (logits if element < FLOAT else 0)
        products = shapes.whole(hidden) + (shapes.stream if shapes.is_sharded else 0)
        products += shapes.weight_gradient(columns, hidden)
        return Rise(saved, shapes.stream + max(softmax_beside_logits, logits + products))
    # The chunked head computes gradients in forward; backward returns the input's, and a dummy for an untied weight's.
    chunk = min(shapes.tokens, job.kernels.loss_chunk_tokens(columns, element, on_cpu=job.on_cpu))
    scaled = chunk * hidden * (FLOAT + (element if element < FLOAT else 0))  # hidden states, each times a factor
    forward = shapes.stream + shapes.gathered + shapes.whole(hidden) + chunk * columns * element + scaled
    is_tied_here = not job.model.untie_embeddings_and_output_weights and job.stages == 1
    return Rise(saved, max(forward, shapes.stream + (0 if is_tied_here else shapes.vocabulary_weight)))


def embedding_backward(shapes: LayerShapes, *, has_head: bool) -> int:
    """Return the bytes of the embedding's backward: gradients of the tokens' vectors and of the rank's rows.

    Args:
        has_head: whether the rank has the loss head, too. Autograd adds a tied head's gradient, or its dummy, out of
            place to the embedding's; from the chunked head it gets neither.
    """
    copies = 1 if shapes.tensor == 1 else 2  # the second has zeros for tokens whose rows other ranks hold
    tokens, rows = shapes.stream + copies * shapes.whole(shapes.hidden), shapes.vocabulary_weight
    job = shapes.job
    is_added = has_head and not (job.model.untie_embeddings_and_output_weights or job.kernels.chunked_loss_head)
    return max(tokens + 2 * rows, 3 * rows) if is_added else tokens + rows  # 3: the two gradients and their sum
