"""The names of tensors, and what follows from it: every conversion, in either direction.

Each row names a tensor as Megatron, the reference and transformers have it. Megatron's form is the hub: a `Naming`
holds a row's names in another format, and an invertible transform from Megatron's tensor to those of these names.
A layer's tensors are those of the model's placement (`model.placements`); no converter has names of its own.
tools/page_tables.py renders the table of all for docs/conversion.md.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_fanformer.checkpoint.full_tensors import LazyTensors, meta_of
from megatron_fanformer.convert import transforms
from megatron_fanformer.convert.transforms import Transform
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.model.placements.base import H, LayerTensor, Size

Format = Literal["megatron", "reference", "hf"]
MOST_NAMES_SHOWN = 12
WEIGHT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


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
    """Megatron's naming: one name, whose transform is the identity except for the vocabulary's padding."""
    shape: tuple[Size, ...]
    """Shape of Megatron's tensor."""
    reference: Naming
    hf: Naming

    def naming(self, format: Format) -> Naming:
        """Return the row as a format has it."""
        return {"megatron": self.megatron, "reference": self.reference, "hf": self.hf}[format]

    def hub(self, config: FANformerConfig, dtype: torch.dtype = torch.float32) -> Tensor:
        """Megatron's tensor on the meta device."""
        return torch.empty([size.of(config) for size in self.shape], dtype=dtype, device="meta")

    @property
    def is_vocabulary(self) -> bool:
        """Return whether the tensor has one row per token id, and rows of padding."""
        return self.shape[0].symbol == "V"


def _vocabulary(megatron: str, reference: str, hf: str) -> Row:
    return Row(
        Naming((megatron,), transforms.VOCABULARY_PADDED),
        (Size("V", lambda config: config.padded_vocab_size), H),
        Naming((reference,), transforms.VOCABULARY_PADDED),
        Naming((hf,), transforms.VOCABULARY_TRIMMED),
    )


EMBEDDING = _vocabulary("embedding.word_embeddings.weight", "transformer.wte.weight", "model.embed_tokens.weight")
FINAL_NORM = Row(
    Naming(("decoder.final_layernorm.weight",)),
    (H,),
    Naming(("transformer.ln_f.weight",)),
    Naming(("model.norm.weight",)),
)
HEAD = _vocabulary("output_layer.weight", "transformer.ff_out.weight", "lm_head.weight")


@functools.cache
def layer_row(tensor: LayerTensor) -> Row:
    """Return the row of a tensor that every layer has."""

    def naming(layer: str, names: tuple[str, ...], transform: str = transforms.IDENTITY.name) -> Naming:
        return Naming(tuple(layer + name for name in names), transforms.BY_NAME[transform])

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
        parts = row.naming(format).transform.split(row.hub(config), config)
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
    """Return the tensors of `source` as those of `target`, in the order of `expected_shapes`, each computed on request.

    They may share the source's memory. A row's tensors are made together: requested in turn, each is made once.

    Args:
        tensors: all of a model; lazy ones are loaded one row at a time.
        config: of the source.
        target_config: if it differs, in the vocabulary's padding; rows are cut off, or zeros added.
        dtype: to round to; None: as they are, but for tensors that become one, which get the wider type of theirs.

    Raises:
        CorruptError: tensors are missing, unknown, of another shape or type than weights here; lists their names.
    """
    known = meta_of(tensors)
    check_tensors(known, config, source)
    goal = target_config or config
    places: dict[str, tuple[Row, int | None]] = {}
    meta: dict[str, Tensor] = {}
    for row, layer in rows_of(config):
        stored = functools.reduce(torch.promote_types, (known[name].dtype for name in names_in(row, layer, source)))
        parts = row.naming(target).transform.split(row.hub(goal, dtype or stored), goal)
        for name, part in zip(names_in(row, layer, target), parts, strict=True):
            places[name], meta[name] = (row, layer), part
    made: dict[str, Tensor] = {}

    def make(name: str) -> Tensor:
        if name not in made:
            row, layer = places[name]
            made.clear()
            hub = row.naming(source).transform.join([tensors[n] for n in names_in(row, layer, source)], config)
            parts = row.naming(target).transform.split(hub, goal)
            made.update(zip(names_in(row, layer, target), parts, strict=True))
        part = made.pop(name)
        return part if dtype is None else part.to(dtype)

    return LazyTensors(meta, make)


def rows_of(config: FANformerConfig) -> Iterator[tuple[Row, int | None]]:
    """Yield the rows that a model has, each with the number of its layer (None where it belongs to none)."""
    yield EMBEDDING, None
    for tensor in config.placement.tensors(config):
        yield from ((layer_row(tensor), layer) for layer in range(config.num_layers))
    yield FINAL_NORM, None
    if config.untie_embeddings_and_output_weights:
        yield HEAD, None


def names_in(row: Row, layer: int | None, format: Format) -> list[str]:
    """Return the names of a row's tensors in a format."""
    return [name.format(layer=layer) for name in row.naming(format).names]


def check_tensors(known: Mapping[str, Tensor], config: FANformerConfig, source: Format) -> None:
    """Check names, shapes and types of a model's tensors in a format.

    Raises:
        CorruptError: tensors are missing, unknown, of another shape or type than weights here; lists their names.
    """
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
        "in no number format of weights": [
            f"{name} ({known[name].dtype})"
            for name in expected
            if name in known and known[name].dtype not in WEIGHT_TYPES
        ],
    }
    text = "; ".join(f"{kind}: {listed(names)}" for kind, names in problems.items() if names)
    if text:
        raise CorruptError(f"the {source} weights do not match their configuration; {text}")


def listed(names: Sequence[str]) -> str:
    """Return some of the names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES_SHOWN} more" if len(names) > MOST_NAMES_SHOWN else ""
    return ", ".join(names[:MOST_NAMES_SHOWN]) + more
