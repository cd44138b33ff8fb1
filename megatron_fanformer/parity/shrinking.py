"""Shrinks a run to a small one, which can be trained many times on any machine, and tests the same layouts.

The small run keeps the ratios of sizes (query heads to groups, FFN to hidden size, p_ratio), the divisibility of sizes
by the degrees of layouts, the padding of the vocabulary, and everything that is not a size, such as the optimizer.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from megatron_fanformer.configuration import flatten
from megatron_fanformer.model.config import FANformerConfig, nearest_p_ratio, p_ratio_of
from megatron_fanformer.runtime.layout import ParallelConfig

HEAD_SIZE = 16
MIN_LAYERS = 4
MIN_SEQUENCE = 32
VOCABULARY_UNIT = 16
PADDING = 3  # the vocabulary is this many ids smaller than a multiple, so that padding is trained, too
MICRO_BATCH = 2
BUCKETS = 4  # of gradients, if their reduction is overlapped: with one bucket, nothing would overlap


@dataclass(frozen=True, kw_only=True)
class SmallRun:
    """The small run that all layouts train, and its changes from the original."""

    model: FANformerConfig
    global_batch_size: int
    micro_batch_size: int
    changes: tuple[str, ...]
    """A text `name before -> after` for each changed field."""


def shrink(model: FANformerConfig, micro_batch_size: int, layouts: list[ParallelConfig]) -> SmallRun:
    """Return the small form of a run; each of the layouts that is legal for the run is legal for the small form."""
    unit = math.lcm(*(layout.tensor_model_parallel_size for layout in layouts))  # divides every size that ranks share
    groups = _groups(model.query_groups, layouts)
    heads = groups * model.num_attention_heads // model.query_groups
    hidden = heads * min(HEAD_SIZE, model.kv_channels)
    ffn_unit = 4 * unit  # a FAN layer of p_ratio 0.25 in the MLP then has rows that `unit` divides
    vocabulary_multiple = math.lcm(VOCABULARY_UNIT, unit)
    # A context parallel rank takes 2 parts of the sequence, which its tensor parallel ranks may divide among them.
    sequence_unit = math.lcm(
        *(layout.context_parallel_size * math.lcm(2, layout.tensor_model_parallel_size) for layout in layouts)
    )
    small = dataclasses.replace(
        model,
        num_layers=_layers(model.num_layers, layouts),
        hidden_size=hidden,
        ffn_hidden_size=max(1, round(model.ffn_hidden_size * hidden / model.hidden_size / ffn_unit)) * ffn_unit,
        num_attention_heads=heads,
        num_query_groups=groups if model.num_query_groups is not None else None,
        vocab_size=VOCABULARY_UNIT * vocabulary_multiple - PADDING,
        make_vocab_size_divisible_by=vocabulary_multiple,
        seq_length=min(model.seq_length, -(-MIN_SEQUENCE // sequence_unit) * sequence_unit),
    )
    small = _with_divisible_rows(model, small, unit)
    micro = min(micro_batch_size, MICRO_BATCH)
    # With virtual stages, the number of micro batches must be a multiple of the number of stages.
    multiples = [layout.pipeline_model_parallel_size if layout.virtual_stages > 1 else 1 for layout in layouts]
    replicas = [layout.data_parallel_size or 1 for layout in layouts]  # each takes 2 micro batches or more
    batch = micro * math.lcm(*(2 * count * multiple for count, multiple in zip(replicas, multiples, strict=True)))
    before, after = (flatten(dataclasses.asdict(config)) for config in (model, small))
    changes = tuple(f"{name} {before[name]} -> {after[name]}" for name in before if before[name] != after[name])
    return SmallRun(model=small, global_batch_size=batch, micro_batch_size=micro, changes=changes)


def _groups(groups: int, layouts: list[ParallelConfig]) -> int:
    """Return a small number of groups that ranks split like `groups`: its gcd with each layout's ranks is the same."""
    fewest = 1
    for layout in layouts:
        ranks = layout.tensor_model_parallel_size * (layout.context_parallel_size if layout.exchanges_heads else 1)
        fewest = math.lcm(fewest, math.gcd(groups, ranks))
    return math.lcm(fewest, 2) if groups % math.lcm(fewest, 2) == 0 else fewest  # even, if `groups` allows it


def _layers(num_layers: int, layouts: list[ParallelConfig]) -> int:
    """Return a small number of layers, which stages and uniform recomputation divide equally."""
    unit = 1
    for layout in layouts:
        counts = (layout.num_layers_in_first_pipeline_stage, layout.num_layers_in_last_pipeline_stage)
        if any(count is not None for count in (*counts, layout.pipeline_model_parallel_layout)):
            return num_layers  # these fields count layers of the whole model
        recomputed = layout.recompute_num_layers if layout.recompute_method == "uniform" else None
        unit = math.lcm(unit, layout.pipeline_model_parallel_size * layout.virtual_stages * (recomputed or 1))
    return min(num_layers, -(-MIN_LAYERS // unit) * unit)


def _with_divisible_rows(model: FANformerConfig, small: FANformerConfig, unit: int) -> FANformerConfig:
    """Return the small model with p_ratios that make the rows of its FAN maps divisible by `unit`.

    A map that has periodic rows in `model` keeps at least `unit` of them.
    """
    for number, full_map in enumerate(model.placement.maps(model)):
        # Read in each round: unless v_p_ratio is set, the map of values has the p_ratio that the first round changes.
        _, field, width, p_ratio = small.placement.maps(small)[number]
        periodic = int(p_ratio * width)
        fewest = unit if int(full_map.p_ratio * full_map.width) else 0
        if periodic < fewest or periodic % unit or (width - 2 * periodic) % unit:
            new: dict[str, Any] = {field: nearest_p_ratio(max(p_ratio, p_ratio_of(fewest, width)), width, unit)}
            small = dataclasses.replace(small, fan=dataclasses.replace(small.fan, **new))
    return small
