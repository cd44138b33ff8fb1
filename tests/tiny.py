"""The model of tests that only need a small one: a few thousand weights, which a test changes as it needs."""

from typing import Any

from megatron_fanformer.model.config import FANformerConfig

TINY: dict[str, int] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 100,
}


def tiny_model(**fields: Any) -> FANformerConfig:
    """The model with other fields."""
    return FANformerConfig(**{**TINY, **fields})
