"""The paper's table 2: its losses, and its models at the same parameters and at the same dimension."""

import dataclasses
from typing import Literal

from megatron_fanformer.model.config import FANConfig, FANformerConfig, as_transformer, with_same_parameters

VARIANTS = {
    "transformer": FANConfig(placement="none"),
    "ffn-fan": FANConfig(placement="ffn", activation="gelu"),
    "atm": FANConfig(p_ratio=0.0, activation="gelu"),
    "atl": FANConfig(p_ratio=0.0),
    "original-fan": FANConfig(activation="gelu"),
    "fanformer": FANConfig(),
}
"""Their fields of `model.fan` (docs/experiments.md#variants); p_ratio, where one is periodic, is the size's own."""
Equal = Literal["parameters", "dimension"]

LOSSES: dict[Equal, dict[str, float]] = {
    "parameters": {
        "transformer": 2.889,
        "ffn-fan": 2.880,
        "atm": 2.890,
        "atl": 2.882,
        "original-fan": 2.893,
        "fanformer": 2.863,
    },
    "dimension": {"transformer": 2.889, "atm": 2.886, "atl": 2.879, "original-fan": 2.887, "fanformer": 2.856},
}
"""Training losses after 10B tokens, at 1B parameters, by what is equal."""


def variants(size: FANformerConfig, equal: Equal = "parameters", *, multiple: int = 4) -> dict[str, FANformerConfig]:
    """The variants of a size that the table has, by name: width, layers and heads are the size's own.

    Args:
        multiple: what d_ff is rounded to, at the same parameters; four times as much for two FAN layers. 4 gives the
            d_ff of the authors' configurations.
    """
    return {name: _variant(size, VARIANTS[name], equal, multiple) for name in LOSSES[equal]}


def _variant(size: FANformerConfig, fan: FANConfig, equal: Equal, multiple: int) -> FANformerConfig:
    fan = dataclasses.replace(fan, bias=size.fan.bias)
    if fan.placement != "none" and fan.p_ratio > 0:
        fan = dataclasses.replace(fan, p_ratio=size.fan.p_ratio)
    model = dataclasses.replace(as_transformer(size), fan=fan)
    if equal == "dimension" or not model.placement.is_fanformer:
        return model
    return with_same_parameters(model, model.placement.ffn_unit * multiple)
