"""The one table of tensor names, and what follows from it: every conversion, in either direction.

Each row names a tensor as Megatron, the reference and transformers have it. Megatron's form is the hub: a `Naming`
holds a row's names in another format, and an invertible transform from Megatron's tensor to those of these names.
No converter has names of its own. docs/conversion.md holds the table as `name_table_markdown` renders it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_fanformer.checkpoint.full_tensors import LazyTensors, meta_of
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.formats import transforms
from megatron_fanformer.formats.transforms import Transform
from megatron_fanformer.model.config import FANformerConfig

Format = Literal["megatron", "reference", "hf"]
MOST_NAMES_SHOWN = 12

SIZES: dict[str, Callable[[FANformerConfig], int]] = {
    "h": lambda config: config.hidden_size,
    "V": lambda config: config.padded_vocab_size,
    "P + G": lambda config: config.periodic_size + config.linear_size,
    "Pv + Gv": lambda config: config.value_size - int(config.fan.value_p_ratio * config.value_size),
    "(n + 2k) d": lambda config: config.qkv_rows,
    "(n + k) d": lambda config: config.qkv_rows,
    "n d": lambda config: config.num_attention_heads * config.kv_channels,
    "f": lambda config: config.ffn_hidden_size,
    "2f": lambda config: 2 * config.ffn_hidden_size,
    "P1 + G1": lambda config: config.ffn_maps[0][0],
    "P2 + G2": lambda config: config.ffn_maps[1][0],
}
"""The sizes in the table's shapes."""

CONDITIONS: dict[str, Callable[[FANformerConfig], bool]] = {
    "always": lambda _: True,
    "with FAN": lambda config: config.has_fan,
    "with FAN and its bias": lambda config: config.has_fan and config.fan.bias,
    "at placement qk_and_v": lambda config: config.fan.placement == "qk_and_v",
    "at placement qk_and_v, with bias": lambda config: config.fan.placement == "qk_and_v" and config.fan.bias,
    "at placement ffn": lambda config: config.fan.in_ffn,
    "at placement ffn, with bias": lambda config: config.fan.in_ffn and config.fan.bias,
    "not at placement ffn": lambda config: not config.fan.in_ffn,
    "not at placement qk_and_v": lambda config: config.fan.placement != "qk_and_v",
    "untied": lambda config: config.untie_embeddings_and_output_weights,
}
"""When a model has a row's tensors."""


@dataclass(frozen=True)
class Naming:
    """A row of the table as one format has it; `{layer}` stands for the layer's number, from 0.

    A format that has no such tensor has no names for it; models that have it are not converted to that format.
    """

    names: tuple[str, ...]
    transform: Transform = transforms.IDENTITY


@dataclass(frozen=True)
class Row:
    """One tensor, or one per layer, in the three formats."""

    megatron: Naming
    """Has one name. Its transform is the identity, except for the vocabulary's padding."""
    shape: tuple[str, ...]
    """Of Megatron's tensor; keys of `SIZES`."""
    reference: Naming
    hf: Naming
    present: str = "always"
    """A key of `CONDITIONS`."""

    def naming(self, format: Format) -> Naming:
        """The row as a format has it."""
        return {"megatron": self.megatron, "reference": self.reference, "hf": self.hf}[format]

    def hub(self, config: FANformerConfig, dtype: torch.dtype = torch.float32) -> Tensor:
        """Megatron's tensor on the meta device."""
        return torch.empty([SIZES[size](config) for size in self.shape], dtype=dtype, device="meta")

    @property
    def is_vocabulary(self) -> bool:
        """Whether the tensor has one row per token id, and rows of padding."""
        return self.shape[0] == "V"


_LAYER, _BLOCK, _HF = "decoder.layers.{layer}.", "transformer.blocks.{layer}.", "model.layers.{layer}."
_ATTENTION, _FAN, _HF_ATTENTION = _LAYER + "self_attention.", _BLOCK + "att_proj.fanlayer.", _HF + "self_attn."


def _same(megatron: str, shape: tuple[str, ...], reference: str, hf: str, present: str = "always") -> Row:
    return Row(Naming((megatron,)), shape, Naming((reference,)), Naming((hf,)), present)


def _vocabulary(megatron: str, reference: str, hf: str, present: str = "always") -> Row:
    return Row(
        Naming((megatron,), transforms.VOCABULARY_PADDED),
        ("V", "h"),
        Naming((reference,), transforms.VOCABULARY_PADDED),
        Naming((hf,), transforms.VOCABULARY_TRIMMED),
        present,
    )


def _fan(megatron: str, shape: tuple[str, ...], reference: str, hf: str, present: str) -> Row:
    rows = transforms.FAN_ROWS
    return Row(
        Naming((_ATTENTION + megatron,)),
        shape,
        Naming((reference,), rows),
        Naming((_HF_ATTENTION + hf,), rows),
        present,
    )


def _ffn_fan(megatron: str, shape: tuple[str, ...], hf: str, present: str) -> Row:
    rows = transforms.FAN_ROWS
    return Row(Naming((f"{_LAYER}mlp.{megatron}",)), shape, Naming(()), Naming((f"{_HF}mlp.{hf}",), rows), present)


NAME_TABLE = (
    _vocabulary("embedding.word_embeddings.weight", "transformer.wte.weight", "model.embed_tokens.weight"),
    _same(_LAYER + "input_layernorm.weight", ("h",), _BLOCK + "attn_norm.weight", _HF + "input_layernorm.weight"),
    _fan("fan.linear.weight", ("P + G", "h"), _FAN + "input_linear.weight", "fan.weight", "with FAN"),
    _fan("fan.linear.bias", ("P + G",), _FAN + "input_linear.bias", "fan.bias", "with FAN and its bias"),
    _fan(
        "fan.v_linear.weight",
        ("Pv + Gv", "h"),
        _BLOCK + "v_fan.input_linear.weight",
        "v_fan.weight",
        "at placement qk_and_v",
    ),
    _fan(
        "fan.v_linear.bias",
        ("Pv + Gv",),
        _BLOCK + "v_fan.input_linear.bias",
        "v_fan.bias",
        "at placement qk_and_v, with bias",
    ),
    Row(
        Naming((_ATTENTION + "linear_qkv.weight",)),
        ("(n + 2k) d", "h"),
        Naming((_BLOCK + "{att_proj}.weight",), transforms.QKV_STACKED),
        Naming(tuple(f"{_HF_ATTENTION}{part}_proj.weight" for part in "qkv"), transforms.QKV_SEPARATE),
        "not at placement qk_and_v",
    ),
    Row(
        Naming((_ATTENTION + "linear_qk.weight",)),
        ("(n + k) d", "h"),
        Naming((_BLOCK + "att_proj.linear.weight",), transforms.QK_STACKED),
        Naming(tuple(f"{_HF_ATTENTION}{part}_proj.weight" for part in "qk"), transforms.QK_SEPARATE),
        "at placement qk_and_v",
    ),
    _same(_ATTENTION + "linear_proj.weight", ("h", "n d"), _BLOCK + "attn_out.weight", _HF_ATTENTION + "o_proj.weight"),
    _same(
        _LAYER + "pre_mlp_layernorm.weight",
        ("h",),
        _BLOCK + "ff_norm.weight",
        _HF + "post_attention_layernorm.weight",
    ),
    Row(
        Naming((_LAYER + "mlp.linear_fc1.weight",)),
        ("2f", "h"),
        Naming((_BLOCK + "ff_proj.weight",), transforms.GATE_UP_SWAPPED),
        Naming((_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"), transforms.GATE_UP_SEPARATE),
        "not at placement ffn",
    ),
    _same(
        _LAYER + "mlp.linear_fc2.weight",
        ("h", "f"),
        _BLOCK + "ff_out.weight",
        _HF + "mlp.down_proj.weight",
        "not at placement ffn",
    ),
    _ffn_fan("linear_fc1.weight", ("P1 + G1", "h"), "fan_1.weight", "at placement ffn"),
    _ffn_fan("linear_fc1.bias", ("P1 + G1",), "fan_1.bias", "at placement ffn, with bias"),
    _ffn_fan("linear_fc2.weight", ("P2 + G2", "f"), "fan_2.weight", "at placement ffn"),
    _ffn_fan("linear_fc2.bias", ("P2 + G2",), "fan_2.bias", "at placement ffn, with bias"),
    _same("decoder.final_layernorm.weight", ("h",), "transformer.ln_f.weight", "model.norm.weight"),
    _vocabulary("output_layer.weight", "transformer.ff_out.weight", "lm_head.weight", "untied"),
)


def expected_shapes(config: FANformerConfig, format: Format) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor that a model of `config` has in a format, in the table's order."""
    shapes = {}
    for row, layer in rows_of(config):
        parts = row.naming(format).transform.split(row.hub(config), config)
        names = names_in(row, layer, config, format)
        shapes.update({name: tuple(part.shape) for name, part in zip(names, parts, strict=True)})
    return shapes


def convert(
    tensors: Mapping[str, Tensor],
    config: FANformerConfig,
    source: Format,
    target: Format,
    *,
    target_config: FANformerConfig | None = None,
    dtype: torch.dtype | None = None,
) -> LazyTensors:
    """The tensors of `source` as those of `target`, in the order of `expected_shapes`, each made on request.

    They may share the source's memory. A row's tensors are made together: requested in turn, each is made once.

    Args:
        tensors: all of a model; lazy ones are loaded one row at a time.
        config: of the source.
        target_config: if it differs, in the vocabulary's padding; rows are cut off, or zeros added.
        dtype: to round to; None: as they are.

    Raises:
        CorruptError: tensors are missing, unknown or of another shape than `config` says; lists their names.
    """
    known = meta_of(tensors)
    _check(known, config, source)
    goal = target_config or config
    places: dict[str, tuple[Row, int | None]] = {}
    meta: dict[str, Tensor] = {}
    for row, layer in rows_of(config):
        stored = known[names_in(row, layer, config, source)[0]].dtype
        parts = row.naming(target).transform.split(row.hub(goal, dtype or stored), goal)
        for name, part in zip(names_in(row, layer, goal, target), parts, strict=True):
            places[name], meta[name] = (row, layer), part
    made: dict[str, Tensor] = {}

    def make(name: str) -> Tensor:
        if name not in made:
            row, layer = places[name]
            made.clear()
            hub = row.naming(source).transform.join([tensors[n] for n in names_in(row, layer, config, source)], config)
            parts = row.naming(target).transform.split(hub, goal)
            made.update(zip(names_in(row, layer, goal, target), parts, strict=True))
        part = made.pop(name)
        return part if dtype is None else part.to(dtype)

    return LazyTensors(meta, make)


def rows_of(config: FANformerConfig) -> Iterator[tuple[Row, int | None]]:
    """The rows that a model has, each with the number of its layer (None where it belongs to none)."""
    for row in NAME_TABLE:
        if CONDITIONS[row.present](config):
            layers = range(config.num_layers) if "{layer}" in row.megatron.names[0] else [None]
            yield from ((row, layer) for layer in layers)


def names_in(row: Row, layer: int | None, config: FANformerConfig, format: Format) -> list[str]:
    """The names of a row's tensors in a format."""
    att_proj = "att_proj.linear" if config.has_fan else "att_proj"
    return [name.format(layer=layer, att_proj=att_proj) for name in row.naming(format).names]


def _check(known: Mapping[str, Tensor], config: FANformerConfig, source: Format) -> None:
    if config.num_layers > len(known):  # checked before a hostile number of names is generated
        raise CorruptError(
            f"the {source} weights do not match their configuration; it states {config.num_layers} layers, and "
            f"there are {len(known)} tensors"
        )
    expected = expected_shapes(config, source)
    wrong_shapes = [
        f"{name} ({list(known[name].shape)} instead of {list(shape)})"
        for name, shape in expected.items()
        if name in known and tuple(known[name].shape) != shape
    ]
    problems = {
        "missing": [name for name in expected if name not in known],
        "unknown": [name for name in known if name not in expected],
        "of another shape": wrong_shapes,
    }
    found = "; ".join(f"{kind}: {listed(names)}" for kind, names in problems.items() if names)
    if found:
        raise CorruptError(f"the {source} weights do not match their configuration; {found}")


def listed(names: Sequence[str]) -> str:
    """Some of the names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES_SHOWN} more" if len(names) > MOST_NAMES_SHOWN else ""
    return ", ".join(names[:MOST_NAMES_SHOWN]) + more
