"""The bytes that the collectives of one training step move, by formula, and compared with a count of them.

Each term is derived from the shapes, for layers of the local spec; a test checks them against what
`runtime.collectives` counts, which they equal exactly, with megatron-core 0.16.1 and 0.19.2. They are of a step in the
course of training: 0.19 has one more all-reduce of 4 bytes in a run's first, where it asks, once, whether any rank has
weights whose gradient norm is to be computed separately.

As in the count, the bytes of a collective are those of its whole tensor: what is reduced, the output of an all-gather,
the input of a reduce-scatter or an all-to-all, what is broadcast or sent.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megatron_fanformer.plan.gradient_buffers import (
    Chunk,
    Weight,
    chunks,
    gradient_buffer,
    limits_buckets,
    weights,
)
from megatron_fanformer.plan.job import Job
from megatron_fanformer.plan.layer_traffic import Term, chunk_terms
from megatron_fanformer.plan.matrix_updates import MatrixUpdates

NORM_BYTES = 4  # one float32
JUDGED_NORM_BYTES = 8  # one float64
REPORT_BYTES = 7 * 8  # sums of losses, tokens and z-losses, and of ranks with each of four interrupts, in float64
TOKEN_COUNT_BYTES = 4  # one int32
# Of samples, in int64: whether they could be read; a token's id, label and position. Its weight in the loss, and its
# document's number, take half a word each.
WORD_BYTES, SAMPLE_STATUS_WORDS, SAMPLE_WORDS = 8, 1, 3


@dataclass(frozen=True, kw_only=True)
class CommunicationLine:
    """Sum of one rank's collectives of one purpose in a job."""

    group: str
    """Name of the group: tp, cp, tp_cp (both), pp, dp_cp (replicas and context parallel ranks), tp_dp_cp (these and
    tp), mp (tp and pp), embd (first and last stage), intra_dp_cp and intra_dist_opt (of dp_cp and of all ranks,
    those that share the optimizer's state), inter_dist_opt (those with the same part of it) or world (all ranks)."""
    kind: str
    """Kind of collective: all-reduce, all-gather, reduce-scatter, all-to-all, broadcast or send."""
    purpose: str
    ranks: int
    """Ranks of the group."""
    calls: int
    message_bytes: int
    """Bytes of all calls together."""


def communication(job: Job, stage: int, rank: int = 0) -> list[CommunicationLine]:
    """Return what a rank of a pipeline stage communicates in one training step, by purpose.

    All of its ranks do alike, but for the matrices that each owns (`matrix_updates`). A group of one rank moves
    nothing.

    Args:
        rank: the number among the stage's ranks.

    Raises:
        ValueError: the layers do not divide evenly over the stages.
    """
    sizes = job.group_sizes(stage)
    lines: dict[tuple[str, str, str], CommunicationLine] = {}
    for group, kind, purpose, message_bytes, calls in _terms(job, stage, rank):
        if sizes[group] == 1 or calls == 0:
            continue
        empty = CommunicationLine(group=group, kind=kind, purpose=purpose, ranks=sizes[group], calls=0, message_bytes=0)
        line = lines.get((group, kind, purpose), empty)
        lines[group, kind, purpose] = replace(
            line, calls=line.calls + calls, message_bytes=line.message_bytes + message_bytes
        )
    return list(lines.values())


def _terms(job: Job, stage: int, rank: int) -> Iterator[Term]:
    model, parallel = job.model, job.parallel
    held = [(chunk, weights(model, parallel, chunk)) for chunk in chunks(model, parallel, stage)]
    yield from _sample_terms(job, stage)
    for chunk, _ in held:
        for term in chunk_terms(job, chunk):
            yield term.times(job.num_micro_batches)
    yield from _pipeline_terms(job, stage)
    for chunk, own in held:
        yield from _replica_terms(job, stage, chunk, own)
    yield from _replicated_weight_terms(job, [weight for _, own in held for weight in own])
    yield from MatrixUpdates(job, stage).terms(rank)
    yield from _scalar_terms(job)


def _sample_terms(job: Job, stage: int) -> Iterator[Term]:
    """Yield the broadcasts of micro batches from the rank that reads them, between hosts where the ranks have GPUs.

    Stages between the ends read none, unless for the bounds of documents.
    """
    if stage in (0, job.stages - 1) or job.has_document_ids:
        tokens = job.micro_batch_size * job.model.seq_length
        words = SAMPLE_STATUS_WORDS + SAMPLE_WORDS * tokens + -(-(1 + job.has_document_ids) * tokens // 2)
        yield Term("tp_cp", "broadcast", "samples", words * WORD_BYTES).times(job.num_micro_batches)


def _pipeline_terms(job: Job, stage: int) -> Iterator[Term]:
    """Return the terms of sending every chunk's output to the next one, and every input gradient back."""
    if job.stages == 1:
        return
    parallel, micro_batches = job.parallel, job.num_micro_batches
    sends = parallel.virtual_stages * micro_batches
    # The interleaved schedule does not batch its exchanges; with two stages megatron-core then has the second one send
    # over the group of all ranks, so that both directions run at once.
    is_apart = parallel.virtual_stages > 1 and job.stages == 2 and stage == 1
    group = "world" if is_apart else "pp"
    forward = Term(group, "send", "pipeline activations", job.boundary_bytes)
    yield forward.times(sends - (stage == job.stages - 1) * micro_batches)
    backward = Term(group, "send", "pipeline gradients", job.boundary_bytes)
    yield backward.times(sends - (stage == 0) * micro_batches)


def _replica_terms(job: Job, stage: int, chunk: Chunk, own: list[Weight]) -> Iterator[Term]:
    """Yield gradients summed over the replicas; with the distributed optimizer each keeps a part, and weights are
    gathered.

    (When they are gathered, after the update or in the next forward, makes no difference to the bytes.)
    """
    parallel = job.parallel
    is_limited = limits_buckets(parallel, stage, chunk)
    buckets = gradient_buffer(own, parallel, job.data_parallel_size, is_limited=is_limited).buckets
    calls = len(buckets) if chunk.number == 0 else 1  # the buckets of a later chunk go together
    elements = sum(buckets)
    kind = "reduce-scatter" if parallel.use_distributed_optimizer else "all-reduce"
    yield Term(job.state_group, kind, "gradients", elements * job.gradient_bytes, calls)
    if parallel.use_distributed_optimizer:
        part = elements // job.state_ranks
        yield Term("inter_dist_opt", "all-reduce", "gradients", part * job.gradient_bytes, calls)
        yield Term(job.state_group, "all-gather", "weights", elements * job.element_bytes, calls)


def _replicated_weight_terms(job: Job, own: list[Weight]) -> Iterator[Term]:
    """Yield gradients of weights that more ranks than the replicas hold."""
    # Of norms and the FAN map of the `sequence` form each rank saw its own part of the sequence; of norms of heads, its
    # own heads.
    if elements := sum(weight.elements for weight in own if weight.is_partial):
        yield Term("tp", "all-reduce", "gradients of replicated weights", elements * job.gradient_bytes)
    for weight in own:
        if weight.is_shared:
            yield Term("embd", "all-reduce", "tied embedding gradients", weight.elements * job.gradient_bytes)


def _scalar_terms(job: Job) -> Iterator[Term]:
    norm_group = "intra_dist_opt" if job.parallel.use_distributed_optimizer else "mp"
    yield Term(norm_group, "all-reduce", "gradient norm", NORM_BYTES)
    if job.group_sizes(0)[norm_group] < job.world_size:  # unless `recovery` judges no steps
        yield Term("world", "all-reduce", "gradient norm", JUDGED_NORM_BYTES)
    yield Term("world", "all-reduce", "loss report", REPORT_BYTES)
    yield Term("pp", "broadcast", "token count", TOKEN_COUNT_BYTES)
    yield Term("dp_cp", "all-reduce", "token count", TOKEN_COUNT_BYTES)


Lines = Iterable[Any]
"""Lines of the formula, or of a count (`runtime.collectives`): both have group, kind, calls and message_bytes."""


class Total(NamedTuple):
    """The total of one kind of collective over one group."""

    calls: int
    message_bytes: int


def totals(lines: Lines) -> dict[tuple[str, str], Total]:
    """Return the totals by group and kind."""
    sums: dict[tuple[str, str], Total] = {}
    for line in lines:
        calls, message_bytes = sums.get((line.group, line.kind), Total(0, 0))
        sums[line.group, line.kind] = Total(calls + line.calls, message_bytes + line.message_bytes)
    return sums


def side_by_side(models: Mapping[str, tuple[Lines, Lines]]) -> dict[tuple[str, str], list[tuple[Total, Total]]]:
    """Return by group and kind, for each model in the order given, the total counted and that of the formula.

    Args:
        models: name -> (counted lines, formula lines), of one rank or of several together.
    """
    summed = [tuple(map(totals, lines)) for lines in models.values()]
    keys = sorted({key for pair in summed for of_lines in pair for key in of_lines})
    nothing = Total(0, 0)
    return {
        key: [(counted.get(key, nothing), formula.get(key, nothing)) for counted, formula in summed] for key in keys
    }
