"""The bytes that the collectives of one training step move, by formula, for layers of the local spec.

A test counts exactly these bytes on real ranks, with megatron-core 0.16.1 and 0.19.2. (In a run's first step 0.19 has
one more all-reduce, of 4 bytes.) The bytes of a collective are those of its whole tensor: the sum of a reduction, the
output of an all-gather, the input of a reduce-scatter or an all-to-all.

All tensor parallel ranks need the input of a column parallel map, and the output of a row parallel map is a sum over
the ranks; sequence parallelism shards both tensors along the sequence. `job` has the legend of shapes.
"""

from collections.abc import Iterator

from megatron_fanformer.plan.gradient_buffers import Chunk, Weight, chunks, gradient_buffer, limits_buckets, weights
from megatron_fanformer.plan.job import Job
from megatron_fanformer.plan.matrix_updates import MatrixUpdates, Term

LOGIT_STATISTIC_BYTES = 4  # the cross entropy is computed in float32
NORM_BYTES = 4  # one float32
JUDGED_NORM_BYTES = 8  # one float64, the largest norm, by which all ranks decide whether a step counts
REPORT_BYTES = 6 * 8  # sums of losses, tokens and z-losses, and of ranks with each of three interrupts, in float64
TOKEN_COUNT_BYTES = 4  # one int32
# Samples travel as words of int64: one says whether they could be read, three hold a token's id, label and position. A
# token's weight in the loss, and the number of its document, take half a word each.
WORD_BYTES, SAMPLE_STATUS_WORDS, SAMPLE_WORDS = 8, 1, 3
ACTIVATIONS, PRE_ACTIVATION = "activations", "FAN pre-activation"


def communication(job: Job, stage: int, rank: int = 0) -> list[Term]:
    """Return the communication of a rank of a pipeline stage in one training step, by purpose.

    All ranks of a stage communicate alike, except that each sends the updates of the matrices that it owns
    (`matrix_updates`). Groups of one rank move nothing and are left out.

    Args:
        rank: the number of the rank within its stage.

    Raises:
        ValueError: the layers do not divide evenly over the stages.
    """
    sizes = job.group_sizes(stage)
    sums: dict[tuple[str, str, str], Term] = {}  # by group, kind and purpose
    for term in _terms(job, stage, rank):
        if sizes[term.group] > 1 and term.calls:
            key = term.group, term.kind, term.purpose
            so_far = sums.get(key, Term(*key, 0, 0))
            sums[key] = Term(*key, so_far.message_bytes + term.message_bytes, so_far.calls + term.calls)
    return list(sums.values())


def _terms(job: Job, stage: int, rank: int) -> Iterator[Term]:
    """Yield a rank's collectives of one training step, also those over groups of one rank, which move nothing."""
    parallel = job.parallel
    chunk_weights = [(chunk, weights(job.model, parallel, chunk)) for chunk in chunks(job.model, parallel, stage)]
    # One rank reads samples and broadcasts them, through host memory (gloo) even if ranks have GPUs. Stages between the
    # first and the last need samples only for the document ids, by which attention ends at the bounds of documents.
    if stage in (0, job.stages - 1) or job.has_document_ids:
        tokens = job.micro_batch_size * job.model.seq_length
        half_words = (2 if job.has_document_ids else 1) * tokens  # weights in the loss and, if read, document numbers
        words = SAMPLE_STATUS_WORDS + SAMPLE_WORDS * tokens + -(-half_words // 2)  # rounded up
        yield Term("tp_cp", "broadcast", "samples", words * WORD_BYTES).times(job.num_micro_batches)
    for chunk, _ in chunk_weights:
        for term in _chunk_terms(job, chunk):
            yield term.times(job.num_micro_batches)
    if job.stages > 1:
        yield from _pipeline_terms(job, stage)
    for chunk, held in chunk_weights:
        yield from _replica_terms(job, stage, chunk, held)
    stage_weights = [weight for _, held in chunk_weights for weight in held]
    if elements := sum(weight.elements for weight in stage_weights if weight.is_partial):
        yield Term("tp", "all-reduce", "gradients of replicated weights", elements * job.gradient_bytes)
    for weight in stage_weights:
        if weight.is_shared:
            yield Term("embd", "all-reduce", "tied embedding gradients", weight.elements * job.gradient_bytes)
    yield from MatrixUpdates(job, stage).terms(rank)
    norm_group = "intra_dist_opt" if parallel.use_distributed_optimizer else "mp"
    yield Term(norm_group, "all-reduce", "gradient norm", NORM_BYTES)
    if job.group_sizes(stage)[norm_group] < job.world_size:  # all ranks judge a step by the largest norm
        yield Term("world", "all-reduce", "gradient norm", JUDGED_NORM_BYTES)
    yield Term("world", "all-reduce", "loss report", REPORT_BYTES)
    yield Term("pp", "broadcast", "token count", TOKEN_COUNT_BYTES)
    yield Term("dp_cp", "all-reduce", "token count", TOKEN_COUNT_BYTES)


# -- a micro batch


def _chunk_terms(job: Job, chunk: Chunk) -> Iterator[Term]:
    """Yield a chunk's collectives for one micro batch, over tensor and context parallel ranks."""
    if chunk.has_embedding:
        yield from _sum(job)  # forward: a rank looks up only the tokens of its part of the vocabulary
        yield from _gather(job)  # backward: every rank needs the gradient of all tokens
    for term in (*layer_forward(job), *layer_backward(job)):
        yield term.times(chunk.layers)
    for term in layer_recomputation(job):
        yield term.times(recomputed_layers(job, chunk.layers))
    if not chunk.has_head:
        return
    yield from _gather(job)  # the loss head's input
    # Three numbers a token are reduced over the shards of the vocabulary: the largest logit, the label's logit, and the
    # sum of exponentials.
    statistics = Term("tp", "all-reduce", "vocabulary cross entropy", job.tokens * LOGIT_STATISTIC_BYTES).times(3)
    if job.kernels.chunked_loss_head:
        # For a chunk of tokens at a time, one call reduces the largest logits, another the two other numbers. Gradients
        # are computed in forward, so backward does not gather the input a second time.
        columns = job.model.padded_vocab_size // job.tensor_ranks
        chunk_tokens = job.kernels.loss_chunk_tokens(columns, job.element_bytes, on_cpu=job.on_cpu)
        yield statistics._replace(calls=2 * -(-job.tokens // chunk_tokens))
        yield from _sum(job)
    else:
        yield statistics
        yield from (*_gather(job), *_sum(job))


def layer_forward(job: Job) -> Iterator[Term]:
    """Yield the collectives of one layer's forward."""
    yield from (*_gather(job), *_before_heads(job), *_core_attention(job), *_sum(job), *_mlp(job))


def layer_backward(job: Job) -> Iterator[Term]:
    """Yield the collectives of one layer's backward, in the order of forward's, without its recomputation.

    Of a gathered input, a rank keeps only its own part for backward. So backward gathers the input of a column parallel
    map again, and sums the input's gradient over the ranks. It gathers the gradient of a row parallel map's output.
    """
    yield from (*_gather(job), *_sum(job))  # the layer's first map
    for term in _before_heads(job):
        yield term._replace(kind="reduce-scatter") if term.kind == "all-gather" else term  # backward of a gather
    if job.parallel.exchanges_heads or job.gathers_twice:  # the context's gradient, or keys and values once more
        yield from _core_attention(job)
    if not job.parallel.exchanges_heads:  # the gradient of the gathered keys and values
        yield Term("cp", "reduce-scatter", "keys and values", _keys_and_values_bytes(job))
    yield from _gather(job)  # the gradient of attention's output
    yield from (*_gather(job), *_sum(job))  # the MLP's first map
    yield from _gather(job, _mlp_output_bytes(job))  # the gradient of the MLP's output


def layer_recomputation(job: Job) -> Iterator[Term]:
    """Yield the collectives that recomputation repeats in one layer; recomputed norms have none."""
    if job.parallel.recompute_granularity == "full":
        yield from layer_forward(job)
    if job.parallel.recomputes("fan") and job.has_column_fan:
        yield Term("tp", "all-gather", PRE_ACTIVATION, job.activation_bytes * job.model.fan_rows)
    if job.parallel.recomputes("core_attn"):
        yield from _core_attention(job)
    if job.parallel.recomputes("mlp"):
        yield from _mlp(job)


def recomputed_layers(job: Job, layers: int) -> int:
    """Return how many of a chunk's `layers` layers are recomputed: all, or with method `block` the first few."""
    return min(layers, job.parallel.recompute_num_layers or 0) if job.parallel.recompute_method == "block" else layers


def _before_heads(job: Job) -> Iterator[Term]:
    """Yield forward's collectives before core attention; in backward their all-gathers become reduce-scatters."""
    model = job.model
    if job.has_column_fan:
        # p | g, k wide, is gathered before the activation. Each rank then has all of X_F, so QKV gathers nothing.
        yield Term("tp", "all-gather", PRE_ACTIVATION, job.activation_bytes * model.fan_rows)
    elif model.placement.has_own_values:
        # A rank computes all values of its tokens, [c / T, b, v], and needs the values of its heads for all tokens.
        values_bytes = job.activation_bytes // job.tensor_ranks * model.value_size
        yield Term("tp", "all-to-all", "values, from tokens to heads", values_bytes)
    if model.query_groups < job.tensor_ranks:
        # Megatron gathers the whole output of QKV, and each rank takes its heads out of it.
        yield Term("tp", "all-gather", "QKV of shared groups", job.activation_bytes * model.qkv_rows)
    if job.parallel.exchanges_heads:
        # A rank gives queries, keys and values of its part of the sequence, [c, b, heads / T, d], and gets those of the
        # whole sequence for a part of the heads.
        heads = model.num_attention_heads + 2 * model.query_groups
        yield Term("cp", "all-to-all", "heads of queries, keys and values", _heads_bytes(job, heads))


def _core_attention(job: Job) -> Iterator[Term]:
    """Yield the collectives of core attention over context parallel ranks, in forward."""
    if job.parallel.exchanges_heads:
        yield Term("cp", "all-to-all", "heads of the context", _heads_bytes(job, job.model.num_attention_heads))
    else:
        yield Term("cp", "all-gather", "keys and values", _keys_and_values_bytes(job))


def _heads_bytes(job: Job, heads: int) -> int:
    """Return the bytes of [c, b, heads / T, d]."""
    return job.activation_bytes * heads // job.tensor_ranks * job.model.kv_channels


def _keys_and_values_bytes(job: Job) -> int:
    """Return the bytes of keys and values of whole samples for one rank's query groups, [s, b, groups, 2 d]."""
    model = job.model
    groups = max(1, model.query_groups // job.tensor_ranks)
    return job.micro_batch_size * model.seq_length * groups * 2 * model.kv_channels * job.element_bytes


def _mlp(job: Job) -> Iterator[Term]:
    """Yield the collectives of the MLP's forward."""
    yield from (*_gather(job), *_sum(job, _mlp_output_bytes(job)))


def _mlp_output_bytes(job: Job) -> int:
    """Return the bytes of the output of the MLP's second map: [c, b, h], or [c, b, k] if the map is a FAN map."""
    _, (rows, _) = job.model.ffn_maps
    return job.activation_bytes * rows


def _gather(job: Job, message_bytes: int | None = None) -> Iterator[Term]:
    """Under sequence parallelism, yield the all-gather of a sharded tensor of `message_bytes` (None: [c, b, h])."""
    if job.parallel.sequence_parallel:
        yield Term("tp", "all-gather", ACTIVATIONS, message_bytes or job.hidden_bytes)


def _sum(job: Job, message_bytes: int | None = None) -> Iterator[Term]:
    """Yield the sum over ranks of a tensor of `message_bytes` (None: [c, b, h]), sharded under sequence parallelism."""
    kind = "reduce-scatter" if job.parallel.sequence_parallel else "all-reduce"
    yield Term("tp", kind, ACTIVATIONS, message_bytes or job.hidden_bytes)


def _pipeline_terms(job: Job, stage: int) -> Iterator[Term]:
    """Yield the sends of a stage: every chunk's output to the next chunk, every input gradient to the previous one."""
    parallel, micro_batches = job.parallel, job.num_micro_batches
    sends = parallel.virtual_stages * micro_batches
    # The interleaved schedule does not batch its exchanges; with two stages megatron-core then has the second one send
    # over the group of all ranks, so that both directions run at once.
    uses_world_group = parallel.virtual_stages > 1 and job.stages == 2 and stage == 1
    group = "world" if uses_world_group else "pp"
    forward = Term(group, "send", "pipeline activations", job.boundary_bytes)
    yield forward.times(sends - micro_batches if stage == job.stages - 1 else sends)  # the last chunk sends nothing
    backward = Term(group, "send", "pipeline gradients", job.boundary_bytes)
    yield backward.times(sends - micro_batches if stage == 0 else sends)  # the first chunk sends no gradient


def _replica_terms(job: Job, stage: int, chunk: Chunk, held: list[Weight]) -> Iterator[Term]:
    """Yield a chunk's collectives over the replicas: the sum of gradients and, if the distributed optimizer shards the
    update, the gathering of updated weights.
    """
    parallel = job.parallel
    is_limited = limits_buckets(parallel, stage, chunk)
    buckets = gradient_buffer(held, parallel, job.data_parallel_size, is_limited=is_limited).buckets
    calls = len(buckets) if chunk.number == 0 else 1  # all buckets of a later chunk go in one call
    elements = sum(buckets)
    kind = "reduce-scatter" if parallel.use_distributed_optimizer else "all-reduce"
    yield Term(job.state_group, kind, "gradients", elements * job.gradient_bytes, calls)
    if parallel.use_distributed_optimizer:
        shard = elements // job.state_ranks  # summed over the optimizer's instances, too
        yield Term("inter_dist_opt", "all-reduce", "gradients", shard * job.gradient_bytes, calls)
        yield Term(job.state_group, "all-gather", "weights", elements * job.element_bytes, calls)
