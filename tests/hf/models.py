"""Small random models for the tests of this folder, and every variant of FAN."""

from typing import Any

import torch
from torch import Tensor

from megatron_fanformer.hf import FANformerConfig, FANformerForCausalLM

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LENGTHS = (11, 4, 7)  # of prompts
PLACES = ("qkv", "qk_and_v")  # where FAN is
OWN_VALUES = {"fan_placement": "qk_and_v", "v_p_ratio": 0.125, "fan_activation": "gelu"}
PLACEMENTS: dict[str, dict[str, Any]] = {"qkv": {}, "qk_and_v": OWN_VALUES, "none": {"fan_placement": "none"}}


def build(attention: str = "sdpa", alpha: float = 0.2, **fields: Any) -> FANformerForCausalLM:
    """A random model in float32; weights drawn wide (`alpha`), so that greedy choices are far from ties."""
    torch.manual_seed(0)
    config = FANformerConfig(**SIZES | fields)
    model = FANformerForCausalLM._from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=alpha)
    return model


def some_ids(batch: int = 2, length: int = 11) -> Tensor:
    return torch.randint(2, 61, (batch, length), generator=torch.Generator().manual_seed(1))


def prompts() -> list[Tensor]:
    """Three of different lengths."""
    return [row[:length] for row, length in zip(some_ids(3), LENGTHS, strict=True)]


def variants() -> dict[str, dict[str, Any]]:
    """Fields of a configuration by what is special about it."""
    fans = {
        "fan": {},
        "atl": {"p_ratio": 0.0},
        "atm": {"p_ratio": 0.0, "fan_activation": "gelu"},
        "original fan": {"fan_activation": "gelu"},
        "all periodic": {"p_ratio": 0.5},
        "no bias": {"fan_bias": False},
    }
    attentions = {"grouped": {}, "multi-query": {"num_key_value_heads": 1}, "full": {"num_key_value_heads": 4}}
    found = {f"{name}, {place}": fields | {"fan_placement": place} for name, fields in fans.items() for place in PLACES}
    found["transformer"] = {"fan_placement": "none"}
    found["FAN layers for the MLP"] = {"fan_placement": "ffn", "fan_activation": "gelu"}
    found["FAN layers for the MLP, no bias"] = {"fan_placement": "ffn", "fan_bias": False, "p_ratio": 0.3}
    found |= {f"norms of heads, {place}": {"use_qk_norm": True, "fan_placement": place} for place in PLACES}
    found["own p for the values"] = {"fan_placement": "qk_and_v", "p_ratio": 0.3, "v_p_ratio": 0.2}
    found |= {
        f"{name}, {tied}, {place}": fields | {"tie_word_embeddings": tied == "tied", "fan_placement": place}
        for name, fields in attentions.items()
        for tied in ("tied", "untied")
        for place in PLACES
    }
    return found


VARIANTS = variants()
