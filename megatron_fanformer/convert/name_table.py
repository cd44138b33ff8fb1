"""The table of tensor names: Megatron's, the authors' and transformers', and the conversion of any into any.

Megatron's form is the hub: a `Naming` holds a row's names in a format, and an invertible `Transform` from Megatron's
tensor to the tensors of these names. Transforms rearrange rows and change no value, so a round trip is exact. A layer's
tensors are those of the model's placement (`model.placements`); no converter has names of its own.
tools/page_tables.py renders the table for docs/conversion.md.

Shapes: n query heads, k query groups, d head size, v vocabulary, h hidden size.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_fanformer.checkpoint.full_tensors import LazyTensors, meta_of
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.model.config import FANformerConfig, p_ratio_of
from megatron_fanformer.model.placements import H, LayerTensor, Size
from megatron_fanformer.terminal import some

Format = Literal["megatron", "reference", "hf"]
WEIGHT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


# -- transforms


@dataclass(frozen=True)
class Transform:
    """The conversion of Megatron's tensor of a row to the tensors of another format, and back."""

    name: str
    # Splits Megatron's tensor ("hub") into the other format's tensors, for a model of the given configuration.
    split: Callable[[Tensor, FANformerConfig], tuple[Tensor, ...]] = lambda hub, _config: (hub,)
    # Joins the other format's tensors to Megatron's.
    join: Callable[[Sequence[Tensor], FANformerConfig], Tensor] = lambda parts, _config: parts[0]


def _group_heads(tensor: Tensor, config: FANformerConfig) -> Tensor:
    """Return rows by query group and head, [k * x * d, h] -> [k, x, d, h], for x heads (of any kind) in each group."""
    return tensor.unflatten(0, (config.query_groups, -1, config.kv_channels))


def _split_heads(hub: Tensor, config: FANformerConfig) -> tuple[Tensor, ...]:
    """Split rows in Megatron's order, group after group, into all queries, all keys and, if there are any, all values.

    A group has queries, one key and one value. If a FAN layer makes the values, they are in another tensor.
    """
    grouped = _group_heads(hub, config)
    queries = config.num_attention_heads // config.query_groups
    keys_and_values = [1] * (grouped.shape[1] - queries)  # heads: one key and, if it is here, one value
    return tuple(part.flatten(0, 2) for part in grouped.split([queries, *keys_and_values], dim=1))


def _join_heads(parts: Sequence[Tensor], config: FANformerConfig) -> Tensor:
    """Join queries, keys and values, group after group: the inverse of `_split_heads`."""
    return torch.cat([_group_heads(part, config) for part in parts], dim=1).flatten(0, 2)


def _join_stacked_heads(parts: Sequence[Tensor], config: FANformerConfig) -> Tensor:
    """Join heads as `_join_heads` does, from one tensor with all queries, then all keys and, if any, all values."""
    (stacked,) = parts
    query_rows, key_rows = config.num_attention_heads * config.kv_channels, config.value_size  # as many for values
    keys_and_values = [key_rows] * ((stacked.shape[0] - query_rows) // key_rows)
    return _join_heads(stacked.split([query_rows, *keys_and_values]), config)


def _swap_halves(tensor: Tensor) -> Tensor:
    return torch.cat(tensor.chunk(2)[::-1])


def vocabulary_multiple(vocab_size: int, rows: int) -> int:
    """Return a multiple to which Megatron pads `vocab_size` ids to get `rows` rows: the usual one or else `rows`."""
    usual = FANformerConfig.make_vocab_size_divisible_by
    return usual if -(-vocab_size // usual) * usual == rows else rows


def resize_vocabulary(tensor: Tensor, rows: int) -> Tensor:
    """Return the vocabulary [v, h] with `rows` rows: the last ones are cut off, or rows of zeros added."""
    missing = rows - tensor.shape[0]
    if missing <= 0:
        return tensor[:rows]
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


IDENTITY = Transform("as it is")
FAN_ROWS = Transform("rows [p | g]")
QKV_SEPARATE = Transform("separate q, k and v", _split_heads, _join_heads)
QKV_STACKED = Transform(
    "all q, then all k, then all v", lambda hub, config: (torch.cat(_split_heads(hub, config)),), _join_stacked_heads
)
QK_SEPARATE = Transform("separate q and k", QKV_SEPARATE.split, QKV_SEPARATE.join)
QK_STACKED = Transform("all q, then all k", QKV_STACKED.split, QKV_STACKED.join)
GATE_UP_SEPARATE = Transform(
    "separate gate and up", lambda hub, _: hub.chunk(2), lambda parts, _: torch.cat(list(parts))
)
GATE_UP_SWAPPED = Transform(
    "up, then gate", lambda hub, _: (_swap_halves(hub),), lambda parts, _: _swap_halves(parts[0])
)
VOCABULARY_PADDED = Transform(
    "vocabulary padded", lambda hub, config: (resize_vocabulary(hub, config.padded_vocab_size),)
)
VOCABULARY_TRIMMED = Transform("padding trimmed", lambda hub, config: (resize_vocabulary(hub, config.vocab_size),))

_IN_LAYERS = (IDENTITY, FAN_ROWS, QKV_SEPARATE, QKV_STACKED, QK_SEPARATE, QK_STACKED, GATE_UP_SEPARATE, GATE_UP_SWAPPED)
LAYER_TRANSFORMS = {transform.name: transform for transform in _IN_LAYERS}


# -- the table


@dataclass(frozen=True)
class Naming:
    """The names of a row's tensors in one format; `{layer}` stands for the layer's number, from 0.

    A format that lacks the tensor has no names for it; a model with the tensor is not converted to that format.
    """

    names: tuple[str, ...]
    transform: Transform = IDENTITY


@dataclass(frozen=True)
class Row:
    """One tensor, or one per layer, in the three formats."""

    megatron: Naming  # one name; the transform is the identity, or pads the vocabulary
    shape: tuple[Size, ...]  # of Megatron's tensor
    reference: Naming
    hf: Naming

    def naming(self, format: Format) -> Naming:
        """Return the names and the transform of one format."""
        return {"megatron": self.megatron, "reference": self.reference, "hf": self.hf}[format]

    def hub(self, config: FANformerConfig, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return Megatron's tensor on the meta device."""
        return torch.empty([size.value(config) for size in self.shape], dtype=dtype, device="meta")


def _vocabulary_row(megatron: str, reference: str, hf: str) -> Row:  # the tensor's names in the three formats
    return Row(
        Naming((megatron,), VOCABULARY_PADDED),
        (Size("V", lambda config: config.padded_vocab_size), H),
        Naming((reference,), VOCABULARY_PADDED),
        Naming((hf,), VOCABULARY_TRIMMED),
    )


EMBEDDING = _vocabulary_row("embedding.word_embeddings.weight", "transformer.wte.weight", "model.embed_tokens.weight")
FINAL_NORM = Row(
    Naming(("decoder.final_layernorm.weight",)),
    (H,),
    Naming(("transformer.ln_f.weight",)),
    Naming(("model.norm.weight",)),
)
HEAD = _vocabulary_row("output_layer.weight", "transformer.ff_out.weight", "lm_head.weight")


@functools.cache
def layer_row(tensor: LayerTensor) -> Row:
    """Return the table's row for a tensor that every layer has."""

    def naming(prefix: str, names: tuple[str, ...], transform_name: str = IDENTITY.name) -> Naming:
        return Naming(tuple(prefix + name for name in names), LAYER_TRANSFORMS[transform_name])

    return Row(
        naming("decoder.layers.{layer}.", (tensor.name,)),
        tensor.shape,
        naming("transformer.blocks.{layer}.", tensor.reference, tensor.reference_transform),
        naming("model.layers.{layer}.", tensor.hf, tensor.hf_transform),
    )


def expected_shapes(config: FANformerConfig, format: Format) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that a model of `config` has in a format, in the table's order."""
    shapes = {}
    for row, layer in rows_of(config):
        parts = row.naming(format).transform.split(row.hub(config), config)  # of Megatron's tensor, on `meta`
        names = names_in(row, layer, format)
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
    """Return a model's tensors in another format, in the order of `expected_shapes`, each computed on request.

    The results may share memory with the source. All tensors of a row are computed together: if they are requested in
    order, every row is computed once.

    Args:
        tensors: all tensors of the model; lazy ones are loaded one row at a time.
        config: the source's configuration.
        target_config: the target's, if its vocabulary has another padding; rows are cut off, or zeros added.
        dtype: the type to round to; None keeps types, and gives joined tensors the widest type among their parts.

    Raises:
        CorruptError: as `check_tensors` raises it.
    """
    given = meta_of(tensors)
    check_tensors(given, config, source)
    target_config = target_config or config
    places: dict[str, tuple[Row, int | None]] = {}
    meta: dict[str, Tensor] = {}
    for row, layer in rows_of(config):
        widest = functools.reduce(torch.promote_types, (given[name].dtype for name in names_in(row, layer, source)))
        parts = row.naming(target).transform.split(row.hub(target_config, dtype or widest), target_config)
        for name, part in zip(names_in(row, layer, target), parts, strict=True):
            places[name] = row, layer
            meta[name] = part
    computed: dict[str, Tensor] = {}  # by name, the tensors of the last row that were not requested yet

    def compute(name: str) -> Tensor:
        if name not in computed:
            row, layer = places[name]
            computed.clear()  # the rows before are not kept, so that memory holds one row alone
            hub = row.naming(source).transform.join([tensors[n] for n in names_in(row, layer, source)], config)
            parts = row.naming(target).transform.split(hub, target_config)
            computed.update(zip(names_in(row, layer, target), parts, strict=True))
        part = computed.pop(name)
        return part if dtype is None else part.to(dtype)

    return LazyTensors(meta, compute)


def rows_of(config: FANformerConfig) -> Iterator[tuple[Row, int | None]]:
    """Yield the rows of a model's tensors, each with the number of the layer; None for a tensor outside the layers."""
    yield EMBEDDING, None
    for tensor in config.placement.tensors(config):
        yield from ((layer_row(tensor), layer) for layer in range(config.num_layers))
    yield FINAL_NORM, None
    if config.untie_embeddings_and_output_weights:
        yield HEAD, None


def names_in(row: Row, layer: int | None, format: Format) -> list[str]:
    """Return the names of a row's tensors in a format."""
    return [name.format(layer=layer) for name in row.naming(format).names]


def check_tensors(given: Mapping[str, Tensor], config: FANformerConfig, source: Format) -> None:
    """Check names, shapes and types of a model's tensors in the format `source`.

    Raises:
        CorruptError: tensors are missing, unknown, of another shape, or of no type of weights; the message names them.
    """
    if config.num_layers > len(given):  # first of all: a hostile configuration may state any number of layers
        raise CorruptError(
            f"the {source} weights do not match their configuration; it states {config.num_layers} layers, and "
            f"there are {len(given)} tensors"
        )
    expected = expected_shapes(config, source)
    wrong_shapes = [
        f"{name} ({list(given[name].shape)} instead of {list(shape)})"
        for name, shape in expected.items()
        if name in given and tuple(given[name].shape) != shape
    ]
    names_by_problem = {
        "missing": [name for name in expected if name not in given],
        "unknown": [name for name in given if name not in expected],
        "of another shape": wrong_shapes,
        "in no number format of weights": [
            f"{name} ({given[name].dtype})"
            for name in expected
            if name in given and given[name].dtype not in WEIGHT_TYPES
        ],
    }
    if text := "; ".join(f"{len(names)} {kind}: {some(names)}" for kind, names in names_by_problem.items() if names):
        raise CorruptError(f"the {source} weights do not match their configuration; {text}")


def inferred_p_ratio(fan_rows: int, width: int, stated: float | None, name: str = "p_ratio") -> float:
    """Return the p_ratio of a FAN map: the stated one or, if none is stated, one that gives the map's number of rows.

    With P periodic rows and an output of w features (`width`), the map also has w - 2P linear rows, in all w - P.
    `name` is the field that states p_ratio, for the message.

    Raises:
        CorruptError: no p_ratio gives `fan_rows` rows, or the stated one gives another number.
    """
    periodic = width - fan_rows
    if not 0 <= periodic <= width // 2:
        raise CorruptError(
            f"the FAN map has {fan_rows} rows, but at hidden size {width} it must have "
            f"{-(-width // 2)} to {width}; use the weights of this model"
        )
    actual = p_ratio_of(periodic, width)
    if stated is None:
        return actual
    is_fraction = type(stated) in (int, float) and 0 <= stated <= 1  # a damaged configuration may hold any value
    if not is_fraction or int(stated * width) != periodic:
        raise CorruptError(
            f"{name} is stated as {stated}, but the FAN map's {fan_rows} rows at hidden size {width} "
            f"are those of p_ratio {actual:g}; correct {name} in the checkpoint's configuration, or remove it"
        )
    return stated
