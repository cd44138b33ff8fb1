"""The memory of one rank in a training step, by purpose and by formula: its tensors at the peak of the step.

First come the tensors that stay from step to step: weights, gradients, main weights, the optimizer's moments. Beside
them a step holds activations of the micro batches in flight and, on top of these, the working memory of a layer's
backward, the loss head, the embedding's gradient or the update. A snapshot is taken of each; the largest is the peak.

The local layers are described as torch runs them on a CPU, where tests measure them (docs/planning.md says how far off
the formula is); the Engine's as its fused kernels run on a GPU.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_fanformer.plan.gradient_buffers import (
    Chunk,
    Weight,
    chunks,
    gradient_buffer,
    layer_weights,
    limits_buckets,
    state_bytes,
    weights,
)
from megatron_fanformer.plan.job import Job
from megatron_fanformer.plan.layer_memory import (
    FLOAT,
    ID_BYTES,
    LayerShapes,
    Rise,
    embedding_backward,
    layer_memory,
    loss_head,
)
from megatron_fanformer.plan.matrix_updates import MatrixUpdates

MAIN_WEIGHT_BYTES = 4  # one float32
FP8_COPIES = 2  # of a weight: as it is, and transposed, which Hopper's products need
SAMPLE_BYTES = 3 * ID_BYTES + FLOAT  # a token's id, label and position, and its weight in the loss

# Tensors (inputs and gradients from other stages) that the interleaved schedule holds beside those of the chunks in
# flight, while forward and backward take turns: one to five were seen.
PREFETCHED = 3
# Reserved by torch's allocator beyond the allocated bytes: SimuMax v1.2 measured 2 to 4 GiB on B200.
ALLOCATOR_BYTES = 4 * 2**30
# The CUDA context and NCCL's buffers, which torch's allocator does not count: an assumption, not a measurement.
CONTEXT_BYTES = 2 * 2**30
TENSORS_ERROR = 0.022  # largest relative error for the tensors of published runs (docs/planning.md)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The tensors of a rank at the peak of a step."""

    stage: int
    moment: str  # the work that the rank does at the peak
    lines: dict[str, int]  # bytes by purpose

    @property
    def total_bytes(self) -> int:
        """Return the peak of allocated tensors."""
        return sum(self.lines.values())


class MemorySnapshot(NamedTuple):
    """Memory at one moment of the step, beside the tensors that stay from step to step."""

    name: str
    activations: int  # bytes, of all micro batches in flight
    working: int  # bytes, beside the activations


def rank_memory(job: Job, stage: int) -> RankMemory:
    """Return the memory of the first rank of a pipeline stage; the stage's other ranks differ by padding alone.

    Raises:
        ValueError: the layers do not divide evenly over the stages.
    """
    shapes = LayerShapes(job)
    held = chunks(job.model, job.parallel, stage)
    chunk_weights = [_chunk_weights(job, stage, chunk) for chunk in held]
    snapshots = [*_snapshots(shapes, stage, held), _update(job, stage, chunk_weights)]
    peak = max(snapshots, key=lambda snapshot: snapshot.activations + snapshot.working)
    lines = {
        **_states(job, chunk_weights),
        **_buffers(shapes, stage, held),
        "activations": peak.activations,
        f"working memory: {peak.name}": peak.working,
    }
    return RankMemory(stage=stage, moment=peak.name, lines={name: size for name, size in lines.items() if size})


def reserve_bytes(job: Job, tensor_bytes: int) -> int:
    """Return the bytes that a GPU must have beside the tensors, for the allocator, communicators and the CUDA context.

    They are 0 on a CPU. They also cover the formula's error, a share of the predicted `tensor_bytes`.
    """
    return 0 if job.on_cpu else ALLOCATOR_BYTES + CONTEXT_BYTES + round(TENSORS_ERROR * tensor_bytes)


# -- from step to step


class _ChunkWeights(NamedTuple):
    weights: list[Weight]  # the last weight first, as in the gradient buffer
    buffered: int  # elements of the gradient buffer, padding included
    updated: list[int]  # elements of each weight that the rank updates


def _chunk_weights(job: Job, stage: int, chunk: Chunk) -> _ChunkWeights:
    """Count the elements of a chunk's weights in the gradient buffer, and those that the rank updates."""
    held, is_limited = weights(job.model, job.parallel, chunk), limits_buckets(job.parallel, stage, chunk)
    buffer = gradient_buffer(held, job.parallel, job.data_parallel_size, is_limited=is_limited)
    updated = buffer.shard_elements(job.state_ranks) if job.parallel.use_distributed_optimizer else buffer.elements
    return _ChunkWeights(held[::-1], buffer.ends[-1], updated)


def _states(job: Job, chunk_weights: list[_ChunkWeights]) -> dict[str, int]:
    """Return the bytes of weights and gradients, padding included, and of this rank's part of the optimizer's state."""
    buffered = sum(chunk.buffered for chunk in chunk_weights)
    updated = sum(sum(chunk.updated) for chunk in chunk_weights)
    # The distributed optimizer gathers weights in a buffer that is laid out as the gradients' is.
    is_sharded = job.parallel.use_distributed_optimizer
    elements = sum(weight.elements for chunk in chunk_weights for weight in chunk.weights)
    return {
        "weights": (buffered if is_sharded else elements) * job.element_bytes,
        "gradients": buffered * job.gradient_bytes,
        "main weights": updated * MAIN_WEIGHT_BYTES if job.element_bytes < FLOAT else 0,
        "moments": sum(state_bytes(chunk.weights, chunk.updated, job.optimizer) for chunk in chunk_weights),
    }


def _buffers(shapes: LayerShapes, stage: int, held: list[Chunk]) -> dict[str, int]:
    """Return the bytes of the buffers that layers and schedule keep from step to step, by purpose."""
    job, lines = shapes.job, dict[str, int]()
    if shapes.is_engine:
        if job.precision.fp8:  # every linear map's weight is copied once a step
            lines["FP8 copies of weights"] = FP8_COPIES * sum(
                weight.elements * sum(chunk.layers for chunk in held)
                for weight in layer_weights(job.model, job.parallel)
                if "linear_" in weight.name or (job.precision.fp8_fan and weight.name.endswith("fan.linear.weight"))
            )
        lines["Transformer Engine's dummy weight gradients"] = _dummy_gradients(shapes, held)
    elif shapes.is_sharded:
        lines["buffer of the sequence's gather"] = shapes.gathered
    alternates = _passes_ahead(job, stage) + 1 < len(held) * job.num_micro_batches  # forward goes on after a backward
    if job.parallel.virtual_stages > 1 and alternates:
        lines["pipeline receive buffers"] = PREFETCHED * shapes.stream
    position_bytes = job.micro_batch_size * SAMPLE_BYTES + len(held) * job.model.kv_channels * FLOAT  # angles by chunk
    lines["samples and rotary angles"] = job.model.seq_length * position_bytes
    return lines


def _dummy_gradients(shapes: LayerShapes, held: list[Chunk]) -> int:
    """Return the bytes of the dummies that autograd gets in place of gradients, one for each shape of weight."""
    if not shapes.is_fused:
        return 0
    hidden = shapes.hidden
    maps = {(shapes.qkv, hidden), (hidden, shapes.queries), (2 * shapes.inner, hidden), (hidden, shapes.inner)}
    if shapes.job.model.has_fan:
        maps.add((shapes.fan_rows, hidden))
    dummies = sum(rows * columns for rows, columns in maps) * shapes.element
    has_megatrons_head = held[-1].has_head and not shapes.job.kernels.chunked_loss_head
    return dummies + (shapes.vocabulary_weight if has_megatrons_head else 0)


# -- within a step


def _snapshots(shapes: LayerShapes, stage: int, held: list[Chunk]) -> Iterator[MemorySnapshot]:
    """Yield the memory at each moment of forward and backward at which it may peak."""
    job, layer = shapes.job, layer_memory(shapes.job)
    rises = [_chunk_rise(shapes, layer, chunk.layers) for chunk in held]
    # The forward passes whose activations are held when the first backward begins. The interleaved schedule runs as
    # many micro batches through one chunk, before it goes on to the next chunk, as there are stages.
    passes = min(_passes_ahead(job, stage) + 1, len(held) * job.num_micro_batches)
    passes_by_chunk = Counter(number // job.stages % len(held) for number in range(passes))
    kept = sum(count * rises[chunk].saved for chunk, count in passes_by_chunk.items())
    # 1F1B keeps the input gradient that it sent last and, during the loss head, the input of that gradient, too.
    sent = shapes.stream if stage > 0 and len(held) == 1 else 0
    for chunk, rise in zip(held, rises, strict=True):
        yield MemorySnapshot("backward of a layer", kept, rise.backward + sent)
        if chunk.has_head:
            head = loss_head(shapes)
            yield MemorySnapshot("loss head", kept + head.saved, head.backward + 2 * sent)
        if chunk.has_embedding:
            gradient = embedding_backward(shapes, has_head=chunk.has_head)
            yield MemorySnapshot("gradient of the embedding", kept - rise.saved, gradient)  # layers have freed theirs


def _update(job: Job, stage: int, chunk_weights: list[_ChunkWeights]) -> MemorySnapshot:
    """Return the memory of the update: float32 copies of narrower gradients, and Muon's working memory."""
    updated = sum(sum(chunk.updated) for chunk in chunk_weights)
    gradient_copies = FLOAT * updated if job.gradient_bytes < FLOAT else 0
    matrices = MatrixUpdates(job, stage).working_bytes()
    return MemorySnapshot("update of a matrix" if matrices else "update", 0, gradient_copies + matrices)


def _passes_ahead(job: Job, stage: int) -> int:
    """Return how many forward passes of chunks a stage runs before forward and backward passes alternate."""
    later_stages, virtual = job.stages - 1 - stage, job.parallel.virtual_stages
    ahead = later_stages if virtual == 1 else 2 * later_stages + (virtual - 1) * job.stages
    return min(ahead, virtual * job.num_micro_batches)


def _chunk_rise(shapes: LayerShapes, layer: Rise, layers: int) -> Rise:
    """Return the memory of a chunk of `layers` layers.

    With `full` recomputation, method `uniform` keeps one input for every `recompute_num_layers` layers, which are
    recomputed together. `block` recomputes the first `recompute_num_layers` layers one by one from their inputs; the
    layers after them keep all that they save, and free it in their backward, before the first layers are recomputed.
    """
    parallel = shapes.job.parallel
    if not layers:
        return Rise(0, 0)
    if parallel.recompute_granularity != "full":
        return Rise(layers * layer.saved, layer.backward)
    number = parallel.recompute_num_layers or 1
    if parallel.recompute_method == "uniform":
        return Rise(layers // number * shapes.stream, number * layer.saved + layer.backward)
    recomputed, kept = min(layers, number), max(0, layers - number)
    kept_backward = layer.backward if kept else 0
    kept_saved = kept * layer.saved  # freed before the recomputed layers' backward
    recomputed_backward = layer.saved + layer.backward - kept_saved if recomputed else 0
    return Rise(recomputed * shapes.stream + kept_saved, max(kept_backward, recomputed_backward))
