"""Transforms of tensors between the formats: named, invertible rearrangements of rows.

A transform goes from Megatron's tensor (the hub) to another format's tensors, and back. None changes a value, so that a
round trip is exact, and gradients convert as weights do. Each is stated once, and both directions of every pair of
formats use it.

Shapes: n query heads, k query groups, d head size, v vocabulary, h hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fanformer.model.config import FANformerConfig


@dataclass(frozen=True)
class Transform:
    """From Megatron's tensor of a row to another format's tensors, and back."""

    name: str
    split: Callable[[Tensor, FANformerConfig], tuple[Tensor, ...]]
    """Split Megatron's tensor; the configuration is that of the model that gets the parts."""
    join: Callable[[Sequence[Tensor], FANformerConfig], Tensor]
    """Join the parts; the configuration is that of the model that they come from."""


def _as_it_is(hub: Tensor, _config: FANformerConfig) -> tuple[Tensor, ...]:
    return (hub,)


def _only_part(parts: Sequence[Tensor], _config: FANformerConfig) -> Tensor:
    return parts[0]


# -- queries, keys, values


def _group_heads(tensor: Tensor, config: FANformerConfig) -> Tensor:
    """Return rows by query group and head: [k * x * d, h] -> [k, x, d, h]."""
    return tensor.unflatten(0, (config.query_groups, -1, config.kv_channels))


def _split_heads(hub: Tensor, config: FANformerConfig) -> tuple[Tensor, ...]:
    """Split each group's queries, key and (without a FAN layer for values) value into all queries, keys, values."""
    grouped = _group_heads(hub, config)
    queries = config.num_attention_heads // config.query_groups
    singles = [1] * (grouped.shape[1] - queries)
    return tuple(part.flatten(0, 2) for part in grouped.split([queries, *singles], dim=1))


def _join_heads(parts: Sequence[Tensor], config: FANformerConfig) -> Tensor:
    return torch.cat([_group_heads(part, config) for part in parts], dim=1).flatten(0, 2)


def _stack_heads(hub: Tensor, config: FANformerConfig) -> tuple[Tensor, ...]:
    return (torch.cat(_split_heads(hub, config)),)


def _unstack_heads(parts: Sequence[Tensor], config: FANformerConfig) -> Tensor:
    stacked = parts[0]
    queries = config.num_attention_heads * config.kv_channels
    others = [config.value_size] * ((stacked.shape[0] - queries) // config.value_size)
    return _join_heads(stacked.split([queries, *others]), config)


def _swap_halves(tensor: Tensor) -> Tensor:
    return torch.cat(tensor.chunk(2)[::-1])


# -- the vocabulary


def vocabulary_multiple(vocab_size: int, rows: int) -> int:
    """Return the multiple to which Megatron pads `vocab_size` token ids, so that they make `rows` rows.

    That is its usual multiple, or `rows` itself where the usual one gives another number.
    """
    usual = FANformerConfig.make_vocab_size_divisible_by
    return usual if -(-vocab_size // usual) * usual == rows else rows


def resize_vocabulary(tensor: Tensor, rows: int) -> Tensor:
    """Cut off rows of the vocabulary [v, h], or add zeros, so that there are `rows`."""
    missing = rows - tensor.shape[0]
    if missing <= 0:
        return tensor[:rows]
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


IDENTITY = Transform("as it is", _as_it_is, _only_part)
FAN_ROWS = Transform("rows [p | g]", _as_it_is, _only_part)
QKV_SEPARATE = Transform("separate q, k and v", _split_heads, _join_heads)
QKV_STACKED = Transform("all q, then all k, then all v", _stack_heads, _unstack_heads)
QK_SEPARATE = Transform("separate q and k", _split_heads, _join_heads)
QK_STACKED = Transform("all q, then all k", _stack_heads, _unstack_heads)
GATE_UP_SEPARATE = Transform(
    "separate gate and up", lambda hub, _: hub.chunk(2), lambda parts, _: torch.cat(list(parts))
)
GATE_UP_SWAPPED = Transform(
    "up, then gate", lambda hub, _: (_swap_halves(hub),), lambda parts, _: _swap_halves(parts[0])
)
VOCABULARY_PADDED = Transform(
    "vocabulary padded", lambda hub, config: (resize_vocabulary(hub, config.padded_vocab_size),), _only_part
)
VOCABULARY_TRIMMED = Transform(
    "padding trimmed", lambda hub, config: (resize_vocabulary(hub, config.vocab_size),), _only_part
)

_OF_LAYERS = (IDENTITY, FAN_ROWS, QKV_SEPARATE, QKV_STACKED, QK_SEPARATE, QK_STACKED, GATE_UP_SEPARATE, GATE_UP_SWAPPED)
BY_NAME = {transform.name: transform for transform in _OF_LAYERS}
