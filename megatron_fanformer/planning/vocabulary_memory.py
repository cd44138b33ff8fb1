"""Memory of the model's two ends: the embedding, and the loss head in its two forms.

Shapes: as in `layer_memory`; V columns of logits of one tensor parallel rank, c tokens of a chunk of the loss head.
"""

from megatron_fanformer.planning.layer_memory import FLOAT, LayerShapes, Rise, norm_backward

FLOAT_LOGITS_BYTES = 2**20  # those of a few rows at a time: `ops.cross_entropy.CACHED_BYTES_PER_THREAD`, of one thread
ROWS_A_BLOCK = 4096  # of a weight's gradient that are held twice: `ops.matrices`
ID_BYTES = 8


def loss_head(shapes: LayerShapes) -> Rise:
    """Return the final norm and the head.

    `saved` is what the final norm keeps, `backward` the most that is held beside that, in forward or in backward.
    """
    saved = shapes.stream + shapes.statistics()
    held = _chunked_head(shapes) if shapes.job.kernels.chunked_loss_head else _whole_head(shapes)
    return Rise(saved, max(held, norm_backward(shapes)))


def vocabulary_weight(shapes: LayerShapes) -> int:
    """Return the bytes of the embedding or of the head, [V, h], in the type of weights."""
    return _columns(shapes) * shapes.hidden * shapes.element


def _columns(shapes: LayerShapes) -> int:
    return shapes.job.model.padded_vocab_size // shapes.tensor


def _chunked_head(shapes: LayerShapes) -> int:
    """Return the chunked head: its gradients are taken in forward; backward gets them, with a stand-in for the
    weight's.
    """
    job, columns, hidden, element = shapes.job, _columns(shapes), shapes.hidden, shapes.element
    chunk = min(shapes.tokens, job.kernels.loss_chunk_tokens(columns, element, on_cpu=job.on_cpu))
    scaled = chunk * hidden * (FLOAT + element if element < FLOAT else FLOAT)  # the hidden states, times a factor each
    in_passes = 0
    if job.on_cpu and element < FLOAT:
        in_passes = min(FLOAT_LOGITS_BYTES, chunk * columns * FLOAT)
        rows = min(ROWS_A_BLOCK, columns) if element < job.gradient_bytes else 0
        scaled = max(scaled, (chunk + rows) * hidden * element)
    normed_and_gradient = shapes.stream + shapes.gathered + shapes.whole(hidden)
    forward = normed_and_gradient + chunk * columns * element + max(in_passes, scaled)
    is_tied_here = not job.model.untie_embeddings_and_output_weights and job.parallel.pipeline_model_parallel_size == 1
    return max(forward, shapes.stream + (0 if is_tied_here else vocabulary_weight(shapes)))


def _whole_head(shapes: LayerShapes) -> int:
    """Return Megatron's head: logits of all tokens, a float32 copy that becomes softmax and gradient, and that in
    bf16.
    """
    columns, element = _columns(shapes), shapes.element
    logits = shapes.tokens * columns * element if element < FLOAT else 0
    softmax = shapes.tokens * columns * FLOAT
    products = shapes.whole(shapes.hidden) + (shapes.stream if shapes.is_sharded else 0)
    products += shapes.weight_gradient(columns, shapes.hidden)
    return shapes.stream + max(softmax + logits, (logits or softmax) + products)


def embedding_ids(shapes: LayerShapes) -> int:
    """Return what backward needs to know: the ids, and which of them are of other ranks."""
    return shapes.tokens * (ID_BYTES if shapes.tensor == 1 else 2 * ID_BYTES)


def embedding_backward(shapes: LayerShapes, *, has_heads: bool) -> int:
    """Return the gradient of the rank's rows, in the type of weights, beside the tokens' of it.

    Args:
        has_heads: whether the head is here, too. If it is tied, autograd adds its gradient to the embedding's (out of
            place, where tensors are tracked), or what stands for it; the chunked head gives autograd none.
    """
    passes = 1 if shapes.tensor == 1 else 2  # those of other ranks' tokens are zeroed in a copy
    tokens, rows = shapes.stream + passes * shapes.whole(shapes.hidden), vocabulary_weight(shapes)
    job = shapes.job
    is_added = has_heads and not (job.model.untie_embeddings_and_output_weights or job.kernels.chunked_loss_head)
    return max(tokens + 2 * rows, 3 * rows) if is_added else tokens + rows
