"""The paper's six variants (its table 2), as fields of a model at one size.

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

from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import FANConfig, FANformerConfig, with_same_parameters
from megatron_fanformer.model.placements import PLACEMENTS

MULTIPLES = (64, 32, 16, 8, 4, 2, 1)  # d_ff is one of the first that is near enough
NEAR_ENOUGH = 1e-3  # of a layer's parameters

VARIANTS: dict[str, FANConfig] = {
    "transformer": FANConfig(placement="none"),
    "ffn-fan": FANConfig(placement="ffn", activation="gelu"),
    "atm": FANConfig(p_ratio=0.0, activation="gelu"),
    "atl": FANConfig(p_ratio=0.0),
    "original-fan": FANConfig(activation="gelu"),
    "fanformer": FANConfig(),
}
"""Their fields of `model.fan`, by name in the table's order; p_ratio, where one is periodic, is the size's own."""


def is_periodic(fan: FANConfig) -> bool:
    """Return whether a model with these fields has cos and sin."""
    return PLACEMENTS[fan.placement].is_fanformer and fan.p_ratio > 0


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
    if is_periodic(variant) and int(base.fan.p_ratio * base.hidden_size) == 0:
        raise InputError(
            f"model.fan.p_ratio is {base.fan.p_ratio:g}, without a periodic row of {base.hidden_size}, which {name} "
            "has; set one such as 0.25"
        )
    fan = dataclasses.replace(base.fan, placement=variant.placement)
    if dataclasses.replace(base, fan=fan).placement.is_fanformer:
        p_ratio = base.fan.p_ratio if is_periodic(variant) else variant.p_ratio
        fan = dataclasses.replace(fan, p_ratio=p_ratio, activation=variant.activation)
    if fan == base.fan:
        return base
    model = dataclasses.replace(base, fan=fan)
    for multiple in MULTIPLES:
        matched = with_same_parameters(model, model.placement.ffn_unit * math.lcm(multiple, divided_by), like=base)
        if abs(matched.placement.parameters(matched) / base.placement.parameters(base) - 1) <= NEAR_ENOUGH:
            break
    return matched
