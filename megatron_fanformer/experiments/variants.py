"""The paper's six variants (its table 2): the fields of a model that make each, at one size.

| name | is |
|---|---|
| `transformer` | no FAN |
| `ffn-fan` | FFN <- FAN: two FAN layers in place of the feed-forward network; our reading of the name |
| `atm` | attention reads gelu(W x + b): the FAN map's place without periodic rows |
| `atl` | attention reads W x + b |
| `original-fan` | attention reads [cos p, sin p, gelu g] |
| `fanformer` | attention reads [cos p, sin p, g] |
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_fanformer.errors import InputError
from megatron_fanformer.formats.fan_of_tensors import Shape, fan_of_tensors
from megatron_fanformer.formats.name_table import Format
from megatron_fanformer.model.config import FANConfig, FANformerConfig, as_transformer, with_same_parameters
from megatron_fanformer.model.placements import PLACEMENTS

Equal = Literal["parameters", "dimension"]

FFN_MULTIPLE = 4
"""What d_ff is rounded to. It gives the d_ff of the authors' configurations at 1B: 7508 of ATM and ATL, 7680 of
FANformer; and is fine enough for models of a laptop's size. For two FAN layers it is four times that, so that tensor
parallel ranks which divide the others' d_ff divide their periodic rows at p_ratio 0.25, too."""

MULTIPLES = (64, 32, 16, 8, 4, 2, 1)  # what d_ff may be one of
NEAR_ENOUGH = 1e-3  # of a layer's parameters


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A row of table 2."""

    title: str
    """Its name in the paper."""
    fan: FANConfig
    """Its fields of `model.fan`; p_ratio, where FAN is periodic, is the size's own."""
    loss: Mapping[Equal, float]
    """The paper's training loss after 10B tokens, at 1B parameters."""

    @property
    def is_periodic(self) -> bool:
        """Return whether it has cos and sin."""
        return PLACEMENTS[self.fan.placement].is_fanformer and self.fan.p_ratio > 0


VARIANTS: dict[str, Variant] = {
    "transformer": Variant(
        title="Transformer", fan=FANConfig(placement="none"), loss={"parameters": 2.889, "dimension": 2.889}
    ),
    "ffn-fan": Variant(
        title="FFN ← FAN (our reading)",
        fan=FANConfig(placement="ffn", activation="gelu"),
        loss={"parameters": 2.880},
    ),
    "atm": Variant(
        title="ATM", fan=FANConfig(p_ratio=0.0, activation="gelu"), loss={"parameters": 2.890, "dimension": 2.886}
    ),
    "atl": Variant(title="ATL", fan=FANConfig(p_ratio=0.0), loss={"parameters": 2.882, "dimension": 2.879}),
    "original-fan": Variant(
        title="original FAN", fan=FANConfig(activation="gelu"), loss={"parameters": 2.893, "dimension": 2.887}
    ),
    "fanformer": Variant(title="FANformer", fan=FANConfig(), loss={"parameters": 2.863, "dimension": 2.856}),
}
"""The variants by name, in the table's order."""


def variants(
    size: FANformerConfig, equal: Equal = "parameters", *, multiple: int = FFN_MULTIPLE
) -> dict[str, FANformerConfig]:
    """Return the variants of a size, by name: those that the paper has at the same parameters, or at the same
    dimension.

    Width, layers and heads are the size's own. At the same dimension d_ff is, too; at the same parameters it is such
    that each variant has as many as the Transformer of the size.

    Args:
        size: a model of any placement; p_ratio is that of the periodic variants.
        multiple: what d_ff is rounded to, at the same parameters; that of `ffn-fan` to four times it.

    Raises:
        InputError: the size's p_ratio is 0, or a variant cannot be built.
    """
    if int(size.fan.p_ratio * size.hidden_size) == 0:
        raise InputError(
            f"model.fan.p_ratio is {size.fan.p_ratio}, without a periodic row of {size.hidden_size}: original FAN "
            "would be ATM, and FANformer ATL; set the p_ratio of the periodic variants, such as 0.25"
        )
    models = {name: _variant(size, each, equal, multiple) for name, each in VARIANTS.items() if equal in each.loss}
    found = [f"variant {name}: {problem}" for name, model in models.items() for problem in model.problems()]
    if found:
        raise InputError("\n".join(found))
    return models


def _variant(size: FANformerConfig, variant: Variant, equal: Equal, multiple: int) -> FANformerConfig:
    fan = dataclasses.replace(variant.fan, bias=size.fan.bias)
    if variant.is_periodic:
        fan = dataclasses.replace(fan, p_ratio=size.fan.p_ratio)
    model = dataclasses.replace(as_transformer(size), fan=fan)
    if equal == "dimension" or not model.placement.is_fanformer:
        return model
    return with_same_parameters(model, model.placement.ffn_unit * multiple)


def variant_like(base: FANformerConfig, name: str, *, divided_by: int = 1) -> FANformerConfig:
    """Return a variant with the parameters of another model, its width, layers and heads; the model itself if it is
    that.

    d_ff is a multiple of 64, as the paper's, where that is near enough, else of the largest smaller power of 2.

    Args:
        divided_by: a number that divides d_ff, such as the tensor parallel size.

    Raises:
        InputError: the variant is periodic, and the model's p_ratio has no periodic row.
    """
    variant = VARIANTS[name]
    if variant.is_periodic and int(base.fan.p_ratio * base.hidden_size) == 0:
        raise InputError(
            f"model.fan.p_ratio is {base.fan.p_ratio:g}, without a periodic row of {base.hidden_size}, which {name} "
            "has; set one such as 0.25"
        )
    fan = dataclasses.replace(base.fan, placement=variant.fan.placement)
    if dataclasses.replace(base, fan=fan).placement.is_fanformer:
        p_ratio = base.fan.p_ratio if variant.is_periodic else variant.fan.p_ratio
        fan = dataclasses.replace(fan, p_ratio=p_ratio, activation=variant.fan.activation)
    if fan == base.fan:
        return base
    model = dataclasses.replace(base, fan=fan)
    for multiple in MULTIPLES:
        matched = with_same_parameters(model, model.placement.ffn_unit * math.lcm(multiple, divided_by), like=base)
        own, others = (each.placement.parameters(each) for each in (matched, base))
        if abs(own / others - 1) <= NEAR_ENOUGH:
            break
    return matched


def recognised(shapes: Mapping[str, Shape], format: Format = "megatron") -> list[str]:
    """Return the variants that a model with these tensors can be, by their names and shapes alone.

    Transformer and FFN <- FAN are recognised for certain. ATM and ATL have the same tensors, as have original FAN and
    FANformer: a GELU on g has no weights, and only a checkpoint's configuration shows it.

    Args:
        shapes: of all tensors, by their names in that format.

    Raises:
        CorruptError: they are not a model's.
    """
    seen = fan_of_tensors(shapes, format)
    return [
        name
        for name, variant in VARIANTS.items()
        if variant.fan.placement == seen.placement and variant.is_periodic == bool(seen.p_ratio)
    ]
