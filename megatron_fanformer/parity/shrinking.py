"""A run made small enough to be trained many times over on any machine, keeping what matters to layouts.

Kept are the ratios (query heads per group, FFN to hidden size, p_ratio), which layouts divide what, the padding of the
vocabulary, tied or untied embeddings, the optimizer, and everything else that is not a size.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from megatron_fanformer.configuration import by_dotted_names
from megatron_fanformer.model.config import FANformerConfig, nearest_p_ratio
from megatron_fanformer.runtime.layout import ParallelConfig

HEAD_SIZE = 16
MIN_LAYERS = 4
MIN_SEQUENCE = 32
VOCABULARY_UNIT = 16
UNPADDED = 3  # ids short of a multiple, so that the vocabulary is padded
MICRO_BATCH = 2
BUCKETS = 4  # so that overlapped communication has several buckets, as a large model's has


@dataclass(frozen=True, kw_only=True)
class SmallRun:
    """The small run that all layouts train, and its changes from the original."""

    model: FANformerConfig
    global_batch_size: int
    micro_batch_size: int
    changes: tuple[str, ...]
    """`name before -> after`, one per changed field."""


def shrink(model: FANformerConfig, micro_batch_size: int, layouts: list[ParallelConfig]) -> SmallRun:
    """Return the small form of a run, on which each of the layouts is legal if it is on the run itself."""
    tensors = [layout.tensor_model_parallel_size for layout in layouts]
    unit = math.lcm(*tensors)
    groups = _groups(model.query_groups, [_ranks_of_heads(layout) for layout in layouts])
    heads = groups * model.num_attention_heads // model.query_groups
    hidden = heads * min(HEAD_SIZE, model.kv_channels)
    ffn_unit = 4 * unit
    multiple = math.lcm(VOCABULARY_UNIT, unit)
    small = dataclasses.replace(
        model,
        num_layers=_layers(model.num_layers, layouts),
        hidden_size=hidden,
        ffn_hidden_size=max(1, round(model.ffn_hidden_size * hidden / model.hidden_size / ffn_unit)) * ffn_unit,
        num_attention_heads=heads,
        num_query_groups=groups if model.num_query_groups is not None else None,
        vocab_size=VOCABULARY_UNIT * multiple - UNPADDED,
        make_vocab_size_divisible_by=multiple,
        seq_length=_sequence(model.seq_length, layouts),
    )
    small = _with_rows_that_divide(model, small, unit)
    micro = min(micro_batch_size, MICRO_BATCH)
    batch = micro * math.lcm(*(2 * (layout.data_parallel_size or 1) * _rounds(layout) for layout in layouts))
    return SmallRun(model=small, global_batch_size=batch, micro_batch_size=micro, changes=_changes(model, small))


def _ranks_of_heads(layout: ParallelConfig) -> int:
    """Return how many ranks share the heads in attention."""
    return layout.tensor_model_parallel_size * (layout.context_parallel_size if layout.exchanges_heads else 1)


def _groups(groups: int, ranks: list[int]) -> int:
    """Key and value heads: as few as still divide, or are divided by, what they did.

    Args:
        ranks: that share the heads, in each layout.
    """
    fewest = math.lcm(*(math.gcd(groups, each) for each in ranks))
    return math.lcm(fewest, 2) if groups % math.lcm(fewest, 2) == 0 else fewest


def _layers(num_layers: int, layouts: list[ParallelConfig]) -> int:
    uneven = (
        "num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage",
        "pipeline_model_parallel_layout",
    )
    if any(getattr(layout, name) is not None for layout in layouts for name in uneven):
        return num_layers  # they name layers of the whole model
    units = (
        layout.pipeline_model_parallel_size * layout.virtual_stages * _layers_at_a_time(layout) for layout in layouts
    )
    unit = math.lcm(*units)
    return min(num_layers, -(-MIN_LAYERS // unit) * unit)


def _layers_at_a_time(layout: ParallelConfig) -> int:
    """Return how many layers are recomputed together, which those of a chunk must be a multiple of."""
    return layout.recompute_num_layers or 1 if layout.recompute_method == "uniform" else 1


def _sequence(seq_length: int, layouts: list[ParallelConfig]) -> int:
    units = (
        math.lcm(2 * layout.context_parallel_size, layout.context_parallel_size * layout.tensor_model_parallel_size)
        for layout in layouts
    )
    unit = math.lcm(*units)
    return min(seq_length, -(-MIN_SEQUENCE // unit) * unit)


def _rounds(layout: ParallelConfig) -> int:
    """Return the unit of micro batches that a replica's schedule takes."""
    return layout.pipeline_model_parallel_size if layout.virtual_stages > 1 else 1


def _with_rows_that_divide(model: FANformerConfig, small: FANformerConfig, unit: int) -> FANformerConfig:
    """Return p_ratios for which the small FAN maps' rows divide as the large ones' do, and are not 0 where those are
    not.
    """
    replaced: dict[str, Any] = {}
    names = ("p_ratio", "v_p_ratio")
    sizes = zip(names, small.sharded_fan_outputs, model.sharded_fan_outputs, strict=False)
    for name, (width, p_ratio), (full_width, _) in sizes:
        periodic = int(p_ratio * width)
        if int(p_ratio * full_width) and not periodic:
            replaced[name] = nearest_p_ratio(unit / width, width, unit)
        elif periodic % unit or (width - 2 * periodic) % unit:
            replaced[name] = nearest_p_ratio(p_ratio, width, unit)
    return dataclasses.replace(small, fan=dataclasses.replace(small.fan, **replaced))


def _changes(model: FANformerConfig, small: FANformerConfig) -> tuple[str, ...]:
    before, after = (by_dotted_names(dataclasses.asdict(each)) for each in (model, small))
    return tuple(f"{name} {before[name]} -> {after[name]}" for name in before if before[name] != after[name])
