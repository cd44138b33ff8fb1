"""Initial weights, by their global names: the reference's `mitchell` scheme.

Normal, truncated at three standard deviations; std 1/sqrt(d) for the embedding, the FAN map, QKV, the MLP's first map
and an untied head, 1/sqrt(2 d (layer + 1)) for the attention's output, 1/sqrt(2 d_ff (layer + 1)) for the MLP's;
layers count from 0; biases are zero, norms one. Source: the authors' implementation. FAN layers in place of the MLP are
drawn as the maps that they replace.
"""

import re
from functools import partial
from typing import Any

import torch

from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.runtime.seeding import initialize_by_name, truncated_normal

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def initialize(sharded_state: dict[str, Any], config: FANformerConfig, seed: int) -> None:
    """Give every parameter of a stage's sharded state dict its slice of the initial model of `seed`."""
    initialize_by_name(sharded_state, seed, partial(draw_weight, config))


def draw_weight(config: FANformerConfig, name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return the whole initial tensor of that global name, in float32."""
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if "layernorm" in name:
        return torch.ones(shape)
    return truncated_normal(shape, initial_std(config, name), generator)


def initial_std(config: FANformerConfig, name: str) -> float:
    """Return the standard deviation of the matrix of that global name."""
    if name.endswith("linear_proj.weight"):
        variance = 1 / (2 * config.hidden_size * _depth(name))
    elif name.endswith("linear_fc2.weight"):
        variance = 1 / (2 * config.ffn_hidden_size * _depth(name))
    else:
        variance = 1 / config.hidden_size
    return variance**0.5


def _depth(name: str) -> int:
    match = _LAYER.search(name)
    assert match, f"{name} is not a layer's weight"
    return int(match[1]) + 1
