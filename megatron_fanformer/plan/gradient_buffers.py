"""The weights that one rank holds, and the buffers in which its gradients are summed over the replicas.

megatron-core lays the gradients of a chunk of layers out in one buffer, last weight first, and communicates it bucket
by bucket. Source of the rules: `_ParamAndGradBuffer` of megatron-core 0.16.1, and in 0.19.2, which moved them,
`optimizer/param_layout.py` and `DistributedOptimizer._compute_per_buffer_param_layout`; both pad alike.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.model.placements import HEAD_NORMS
from megatron_fanformer.runtime.layout import ParallelConfig

WEIGHT_START = 64  # elements: with the distributed optimizer, every weight starts at a multiple of this number,
BUCKET_END = 128  # and every bucket ends at a multiple of this one and of the ranks that share the state
LEAST_BUCKET = 40_000_000  # elements: the default bucket size is at least this number,
BUCKET_PER_REPLICA = 1_000_000  # or this one times the replicas, if that is more

EMBEDDING = "word_embeddings"  # part of an embedding's name; stands for the names of both copies of a tied one


class OptimizerStates(Protocol):
    """States that an optimizer keeps for each weight, beside the main weight itself.

    `name` is a weight's name in Megatron's modules, or `EMBEDDING` for the two copies of a tied embedding. Norms and
    biases have one dimension, matrices two.
    """

    def state_bytes(self, name: str, dimensions: int) -> int:
        """Return the bytes of the states for each element of the weight."""

    def takes_whole(self, name: str, dimensions: int) -> bool:
        """Return whether the update of an element depends on the whole weight, so that ranks exchange their parts."""


class Weight(NamedTuple):
    """One parameter of one rank."""

    name: str  # Megatron's, without the layer's number
    elements: int  # on this rank
    # Whether each tensor parallel rank has the whole weight, but computes a gradient from its part of the sequence, or
    # from its heads, alone, so that the weight's gradient is the sum over the ranks.
    is_partial: bool = False
    is_shared: bool = False  # one of two copies of a tied embedding, on the first and the last stage

    @property
    def dimensions(self) -> int:
        """Return 1 for norms and biases, 2 for matrices."""
        return 1 if self.name.endswith(("norm.weight", ".bias")) else 2


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A run of layers that one rank holds: its stage, or a part of it under the interleaved schedule."""

    number: int
    layers: int
    has_embedding: bool
    has_head: bool


def chunks(model: FANformerConfig, parallel: ParallelConfig, stage: int) -> list[Chunk]:
    """Return the chunks of a pipeline stage.

    Raises:
        ValueError: the layers do not divide evenly over the stages.
    """
    segments = parallel.segments(model.num_layers)
    if segments is None:
        raise ValueError(f"{model.num_layers} layers do not divide over the chunks; see model.layout_rules")
    last = parallel.virtual_stages - 1, parallel.pipeline_model_parallel_size - 1  # chunk number and stage
    return [
        Chunk(
            number=number,
            layers=segments[number][stage],
            has_embedding=(number, stage) == (0, 0),
            has_head=(number, stage) == last,
        )
        for number in range(parallel.virtual_stages)
    ]


def weights(model: FANformerConfig, parallel: ParallelConfig, chunk: Chunk) -> list[Weight]:
    """Return the weights of a chunk on one tensor parallel rank, in the order of Megatron's local modules."""
    vocabulary_elements = model.padded_vocab_size // parallel.tensor_model_parallel_size * model.hidden_size
    is_tied = not model.untie_embeddings_and_output_weights
    has_two_copies = is_tied and parallel.pipeline_model_parallel_size > 1
    held = [*layer_weights(model, parallel)] * chunk.layers
    if chunk.has_embedding:
        held.insert(0, Weight("embedding.word_embeddings.weight", vocabulary_elements, is_shared=has_two_copies))
    if chunk.has_head:
        held.append(Weight("decoder.final_layernorm.weight", model.hidden_size, is_partial=parallel.sequence_parallel))
        if not is_tied or has_two_copies:  # otherwise the head uses the embedding's weight
            held.append(Weight("output_layer.weight", vocabulary_elements, is_shared=has_two_copies))
    return held


def layer_weights(model: FANformerConfig, parallel: ParallelConfig) -> Iterator[Weight]:
    """Yield the weights of a layer on one tensor parallel rank, in the order of Megatron's local modules."""
    h, ranks, is_partial = model.hidden_size, parallel.tensor_model_parallel_size, parallel.sequence_parallel
    placement = model.placement
    (rows, columns), (rows_2, columns_2) = model.ffn_maps
    has_whole_fan = parallel.fan_form == "sequence"
    fan_rows = model.fan_rows // (1 if has_whole_fan else ranks)
    fan: list[Weight] = []
    if model.has_fan:
        fan.append(Weight("self_attention.fan.linear.weight", fan_rows * h, has_whole_fan))
        if model.fan.bias:
            fan.append(Weight("self_attention.fan.linear.bias", fan_rows, has_whole_fan))
    qkv_name = "self_attention.linear_qk.weight" if placement.has_own_values else "self_attention.linear_qkv.weight"
    qkv = Weight(qkv_name, model.qkv_rows // ranks * h)
    head_norms = [Weight(norm.name, model.kv_channels, is_partial=True) for norm in HEAD_NORMS if norm.exists_in(model)]
    has_biases = placement.has_fan_mlp and model.fan.bias
    yield Weight("input_layernorm.weight", h, is_partial)
    yield Weight("self_attention.linear_proj.weight", model.num_attention_heads // ranks * model.kv_channels * h)
    # The attention module whose values are a FAN output has its FAN map before QKV, the others behind the head norms.
    yield from [*fan, qkv, *head_norms] if placement.has_own_values else [qkv, *head_norms, *fan]
    yield Weight("pre_mlp_layernorm.weight", h, is_partial)
    yield Weight("mlp.linear_fc1.weight", rows // ranks * columns)
    if has_biases:
        yield Weight("mlp.linear_fc1.bias", rows // ranks)
    yield Weight("mlp.linear_fc2.weight", rows_2 * columns_2 // ranks)
    if has_biases:  # the bias is whole on each rank, which adds it to the rank's part of the sequence
        yield Weight("mlp.linear_fc2.bias", rows_2, is_partial)


class GradientBuffer(NamedTuple):
    """The positions of a chunk's gradients in their buffer, in elements; the last weight is first."""

    starts: list[int]  # of each weight
    elements: list[int]  # of each weight
    ends: list[int]  # a 0, then the end of each bucket, padding included

    @property
    def buckets(self) -> list[int]:
        """Return the elements of each bucket, padding included, in the order of backward."""
        return [end - before for before, end in itertools.pairwise(self.ends)]

    def shard_elements(self, ranks: int, rank: int = 0) -> list[int]:
        """Return how many elements of each weight a rank updates, if `ranks` ranks share every bucket equally."""
        updated, weight = [], 0
        for bucket_start, bucket_end in itertools.pairwise(self.ends):
            size = (bucket_end - bucket_start) // ranks
            shard_start = bucket_start + rank * size
            while weight < len(self.starts) and self.starts[weight] < bucket_end:  # no weight spans two buckets
                start = max(self.starts[weight], shard_start)
                end = min(self.starts[weight] + self.elements[weight], shard_start + size)
                updated.append(max(0, end - start))
                weight += 1
        return updated


def state_bytes(held: Sequence[Weight], elements: Sequence[int], optimizer: OptimizerStates) -> int:
    """Return the bytes of an optimizer's states for `elements[i]` elements of weight `held[i]`, for all weights."""
    per_element = {
        weight: optimizer.state_bytes(EMBEDDING if weight.is_shared else weight.name, weight.dimensions)
        for weight in set(held)  # all layers have equal weights
    }
    return sum(per_element[weight] * count for weight, count in zip(held, elements, strict=True))


def first_stage_weights(model: FANformerConfig, parallel: ParallelConfig, layers: int) -> list[Weight]:
    """Return the weights of a rank of the first stage, for `layers` layers in one chunk."""
    is_alone = parallel.pipeline_model_parallel_size == 1
    return weights(model, parallel, Chunk(number=0, layers=layers, has_embedding=True, has_head=is_alone))


def first_stage_buckets(model: FANformerConfig, parallel: ParallelConfig, data_parallel_size: int, layers: int) -> int:
    """Return the number of gradient buckets of a rank of the first stage, for `layers` layers in all its chunks."""
    held = first_stage_weights(model, parallel, -(-layers // parallel.virtual_stages))  # of the first chunk
    buffer = gradient_buffer(held, parallel, data_parallel_size, is_limited=bool(parallel.overlap_grad_reduce))
    return len(buffer.buckets) + parallel.virtual_stages - 1  # each chunk after the first is one bucket


def gradient_buffer(
    held: list[Weight], parallel: ParallelConfig, data_parallel_size: int, *, is_limited: bool
) -> GradientBuffer:
    """Return the layout of a chunk's gradients in their buffer.

    The distributed optimizer pads each bucket, so that it divides over the ranks that share the state, and gives a
    shared embedding a bucket of its own, so that both copies are sharded alike. Other optimizers need neither.

    Args:
        is_limited: whether the size of buckets is limited (`limits_buckets`); if not, the chunk is one bucket.
    """
    default = max(LEAST_BUCKET, BUCKET_PER_REPLICA * data_parallel_size)
    size = (parallel.ddp_bucket_size or default) if is_limited else math.inf  # elements at which a bucket ends
    is_sharded = parallel.use_distributed_optimizer
    unit = math.lcm(parallel.state_ranks(data_parallel_size), BUCKET_END) if is_sharded else 1
    alignment = WEIGHT_START if is_sharded else 1
    starts, ends, start, bucket_start = [], [0], 0, 0
    for weight in reversed(held):
        has_own_bucket = weight.is_shared and is_sharded
        start = _round_up(start, alignment)
        if has_own_bucket and start > bucket_start:  # end the bucket of the weights before
            bucket_start = start = _round_up(start, unit)
            ends.append(start)
        starts.append(start)
        start += weight.elements
        if has_own_bucket or start - bucket_start >= size:
            bucket_start = start = _round_up(start, unit)
            ends.append(start)
    if start > bucket_start:
        ends.append(_round_up(start, unit))
    return GradientBuffer(starts, [weight.elements for weight in reversed(held)], ends)


def limits_buckets(parallel: ParallelConfig, stage: int, chunk: Chunk) -> bool:
    """Return whether a chunk's buckets are limited in size: with overlap, those of the model's first chunk alone.

    Backward ends in that chunk, so only its own backward can hide its communication. The gradients of any other chunk
    are sent all at once, while the backward of earlier chunks still runs.
    """
    return bool(parallel.overlap_grad_reduce) and stage == 0 and chunk.number == 0


def _round_up(number: int, divisor: int) -> int:
    """Return the least multiple of `divisor` that is not below `number`."""
    return -(-number // divisor) * divisor
