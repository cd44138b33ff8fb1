"""The one table of tensor names, and what happens to a tensor between the three formats.

Each row names a tensor as Megatron, the reference and transformers have it. Megatron's form is the hub:
another format's form of a row holds its names, and an invertible transform from Megatron's tensor to the
tensors of those names. Every conversion, in either direction, follows from the table. The transforms move
rows and change no value, so a round trip is exact, and gradients convert as weights do.

Shapes: h hidden size, v vocabulary, n query heads, k query groups, d head size, f ffn size.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.model.config import FANformerConfig, p_ratio_of

Format = Literal["megatron", "reference", "hf"]
MOST_NAMES_SHOWN = 12


@dataclass(frozen=True)
class Transform:
    """From Megatron's tensor of a row to another format's tensors, and back."""

    name: str
    split: Callable[[Tensor, FANformerConfig], tuple[Tensor, ...]]
    join: Callable[[Sequence[Tensor], FANformerConfig], Tensor]


def _group_heads(tensor: Tensor, config: FANformerConfig) -> Tensor:
    """Rows by query group and head: [k * x * d, h] -> [k, x, d, h]."""
    return tensor.unflatten(0, (config.query_groups, -1, config.kv_channels))


def _split_heads(grouped: Tensor, config: FANformerConfig) -> tuple[Tensor, ...]:
    """Each group's queries, key, value -> all queries, all keys, all values."""
    queries = config.num_attention_heads // config.query_groups
    return tuple(part.flatten(0, 2) for part in _group_heads(grouped, config).split([queries, 1, 1], dim=1))


def _join_heads(parts: Sequence[Tensor], config: FANformerConfig) -> Tensor:
    return torch.cat([_group_heads(part, config) for part in parts], dim=1).flatten(0, 2)


def _split_stacked(parts: Sequence[Tensor], config: FANformerConfig) -> tuple[Tensor, ...]:
    """The reference's rows: all queries, all keys, all values."""
    heads = (config.num_attention_heads, config.query_groups, config.query_groups)
    return parts[0].split([count * config.kv_channels for count in heads])


def _swap_halves(tensor: Tensor) -> Tensor:
    return torch.cat(tensor.chunk(2)[::-1])


def _pad_vocabulary(tensor: Tensor, config: FANformerConfig) -> Tensor:
    """[v, h] -> [padded v, h]. Padded rows were dropped and are gone; zeros stand in for them."""
    padding = config.padded_vocab_size - tensor.shape[0]
    return torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])])


IDENTITY = Transform("identity", lambda hub, _: (hub,), lambda parts, _: parts[0])
QKV_SEPARATE = Transform("separate q, k and v", _split_heads, _join_heads)
QKV_STACKED = Transform(
    "all q, then all k, then all v",
    lambda hub, config: (torch.cat(_split_heads(hub, config)),),
    lambda parts, config: _join_heads(_split_stacked(parts, config), config),
)
GATE_UP_SEPARATE = Transform(
    "separate gate and up", lambda hub, _: hub.chunk(2), lambda parts, _: torch.cat(list(parts))
)
GATE_UP_SWAPPED = Transform(
    "up, then gate", lambda hub, _: (_swap_halves(hub),), lambda parts, _: _swap_halves(parts[0])
)
VOCABULARY_TRIMMED = Transform(
    "padded vocabulary rows trimmed",
    lambda hub, config: (hub[: config.vocab_size],),
    lambda parts, config: _pad_vocabulary(parts[0], config),
)


@dataclass(frozen=True)
class Form:
    """A row of the table as one format has it; `{layer}` stands for the layer's number, from 0."""

    names: tuple[str, ...]
    transform: Transform = IDENTITY


@dataclass(frozen=True)
class Row:
    """One tensor, or one a layer, in the three formats."""

    megatron: str
    shape: Callable[[FANformerConfig], tuple[int, ...]]
    """Of Megatron's tensor."""
    reference: Form
    hf: Form
    present: Callable[[FANformerConfig], bool] = lambda _: True

    def form(self, form: Format) -> Form:
        """The row as `form` has it."""
        return {"megatron": Form((self.megatron,)), "reference": self.reference, "hf": self.hf}[form]


def _hidden(config: FANformerConfig) -> tuple[int, ...]:
    return (config.hidden_size,)


def _vocabulary(config: FANformerConfig) -> tuple[int, ...]:
    return config.padded_vocab_size, config.hidden_size


def _fan_rows(config: FANformerConfig) -> int:
    return config.periodic_size + config.linear_size


_LAYER, _BLOCK, _HF = "decoder.layers.{layer}.", "transformer.blocks.{layer}.", "model.layers.{layer}."

TABLE = (
    Row(
        "embedding.word_embeddings.weight",
        _vocabulary,
        Form(("transformer.wte.weight",)),
        Form(("model.embed_tokens.weight",), VOCABULARY_TRIMMED),
    ),
    Row(
        _LAYER + "input_layernorm.weight",
        _hidden,
        Form((_BLOCK + "attn_norm.weight",)),
        Form((_HF + "input_layernorm.weight",)),
    ),
    Row(
        _LAYER + "self_attention.fan.linear.weight",
        lambda config: (_fan_rows(config), config.hidden_size),
        Form((_BLOCK + "att_proj.fanlayer.input_linear.weight",)),
        Form((_HF + "self_attn.fan.weight",)),
        lambda config: config.has_fan,
    ),
    Row(
        _LAYER + "self_attention.fan.linear.bias",
        lambda config: (_fan_rows(config),),
        Form((_BLOCK + "att_proj.fanlayer.input_linear.bias",)),
        Form((_HF + "self_attn.fan.bias",)),
        lambda config: config.has_fan and config.fan.bias,
    ),
    Row(
        _LAYER + "self_attention.linear_qkv.weight",
        lambda config: (
            (config.num_attention_heads + 2 * config.query_groups) * config.kv_channels,
            config.hidden_size,
        ),
        Form((_BLOCK + "{att_proj}.weight",), QKV_STACKED),
        Form(tuple(f"{_HF}self_attn.{part}_proj.weight" for part in "qkv"), QKV_SEPARATE),
    ),
    Row(
        _LAYER + "self_attention.linear_proj.weight",
        lambda config: (config.hidden_size, config.num_attention_heads * config.kv_channels),
        Form((_BLOCK + "attn_out.weight",)),
        Form((_HF + "self_attn.o_proj.weight",)),
    ),
    Row(
        _LAYER + "pre_mlp_layernorm.weight",
        _hidden,
        Form((_BLOCK + "ff_norm.weight",)),
        Form((_HF + "post_attention_layernorm.weight",)),
    ),
    Row(
        _LAYER + "mlp.linear_fc1.weight",
        lambda config: (2 * config.ffn_hidden_size, config.hidden_size),
        Form((_BLOCK + "ff_proj.weight",), GATE_UP_SWAPPED),
        Form((_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"), GATE_UP_SEPARATE),
    ),
    Row(
        _LAYER + "mlp.linear_fc2.weight",
        lambda config: (config.hidden_size, config.ffn_hidden_size),
        Form((_BLOCK + "ff_out.weight",)),
        Form((_HF + "mlp.down_proj.weight",)),
    ),
    Row(
        "decoder.final_layernorm.weight",
        _hidden,
        Form(("transformer.ln_f.weight",)),
        Form(("model.norm.weight",)),
    ),
    Row(
        "output_layer.weight",
        _vocabulary,
        Form(("transformer.ff_out.weight",)),
        Form(("lm_head.weight",), VOCABULARY_TRIMMED),
        lambda config: config.untie_embeddings_and_output_weights,
    ),
)


def expected_shapes(config: FANformerConfig, form: Format) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor that a model of `config` has in a format, in the table's order."""
    shapes = {}
    for row, layer in _rows(config):
        hub = torch.empty(row.shape(config), device="meta")
        parts = row.form(form).transform.split(hub, config)
        names = _names(row, layer, config, form)
        shapes.update({name: tuple(part.shape) for name, part in zip(names, parts, strict=True)})
    return shapes


def convert(
    tensors: Mapping[str, Tensor], config: FANformerConfig, source: Format, target: Format
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `source` as (name, tensor) pairs of `target`, one row of the table at a time.

    The pairs come in the order of `expected_shapes(config, target)`; tensors may share the source's memory.

    Raises:
        CorruptError: tensors are missing, unknown or of another shape than `config` says; lists their names.
    """
    _check(tensors, config, source)
    for row, layer in _rows(config):
        sources = [tensors[name] for name in _names(row, layer, config, source)]
        hub = row.form(source).transform.join(sources, config)
        parts = row.form(target).transform.split(hub, config)
        yield from zip(_names(row, layer, config, target), parts, strict=True)


def reference_to_megatron(tensors: Mapping[str, Tensor], config: FANformerConfig) -> dict[str, Tensor]:
    """Reference tensors under Megatron's names; raises CorruptError."""
    return dict(convert(tensors, config, "reference", "megatron"))


def megatron_to_reference(tensors: Mapping[str, Tensor], config: FANformerConfig) -> dict[str, Tensor]:
    """Megatron tensors under the reference's names; raises CorruptError."""
    return dict(convert(tensors, config, "megatron", "reference"))


def megatron_to_hf(tensors: Mapping[str, Tensor], config: FANformerConfig) -> dict[str, Tensor]:
    """Megatron tensors under transformers' names, padded vocabulary rows trimmed; raises CorruptError."""
    return dict(convert(tensors, config, "megatron", "hf"))


def hf_to_megatron(tensors: Mapping[str, Tensor], config: FANformerConfig) -> dict[str, Tensor]:
    """transformers' tensors under Megatron's names, padded vocabulary rows zero; raises CorruptError."""
    return dict(convert(tensors, config, "hf", "megatron"))


def inferred_p_ratio(fan_rows: int, hidden_size: int, stated: float | None) -> float:
    """The p_ratio of a FAN map with `fan_rows` rows: h - P of them, since P + G = P + (h - 2P).

    Returns `stated` where it gives that many rows, else P / h where nothing was stated.

    Raises:
        CorruptError: no p_ratio gives `fan_rows` rows.
        InputError: the stated p_ratio disagrees with the weights.
    """
    periodic = hidden_size - fan_rows
    if not 0 <= periodic <= hidden_size // 2:
        raise CorruptError(
            f"the FAN map has {fan_rows} rows; at hidden size {hidden_size} it must have "
            f"{-(-hidden_size // 2)} to {hidden_size}: the weights are of another model"
        )
    actual = p_ratio_of(periodic, hidden_size)
    if stated is None:
        return actual
    if not math.isfinite(stated) or int(stated * hidden_size) != periodic:
        raise InputError(
            f"p_ratio is stated as {stated}, but the FAN map's {fan_rows} rows at hidden size {hidden_size} "
            f"are those of p_ratio {actual:g}: correct the stated one, or leave it out"
        )
    return stated


def _rows(config: FANformerConfig) -> Iterator[tuple[Row, int | None]]:
    for row in TABLE:
        if row.present(config):
            layers = range(config.num_layers) if "{layer}" in row.megatron else [None]
            yield from ((row, layer) for layer in layers)


def _names(row: Row, layer: int | None, config: FANformerConfig, form: Format) -> list[str]:
    att_proj = "att_proj.linear" if config.has_fan else "att_proj"
    return [name.format(layer=layer, att_proj=att_proj) for name in row.form(form).names]


def _check(tensors: Mapping[str, Tensor], config: FANformerConfig, source: Format) -> None:
    expected = expected_shapes(config, source)
    wrong_shapes = [
        f"{name} ({list(tensors[name].shape)} instead of {list(shape)})"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems = {
        "missing": [name for name in expected if name not in tensors],
        "unknown": [name for name in tensors if name not in expected],
        "of another shape": wrong_shapes,
    }
    found = "; ".join(f"{kind}: {_listed(names)}" for kind, names in problems.items() if names)
    if found:
        raise CorruptError(f"the {source} weights are not those of their configuration; {found}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES_SHOWN} more" if len(names) > MOST_NAMES_SHOWN else ""
    return ", ".join(names[:MOST_NAMES_SHOWN]) + more
