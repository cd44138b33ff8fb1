"""Builds a FANformer and its twins for the probes, as models for transformers: plain PyTorch, no process groups."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from megatron_fanformer.convert.huggingface import to_huggingface_config
from megatron_fanformer.hf import FANformerForCausalLM
from megatron_fanformer.model.config import FANformerConfig, as_transformer, with_same_parameters

TRANSFORMER = "Transformer"
SAME_PARAMETERS = "FANformer, same parameters"
FFN_RATIO = 4  # width of the FFN over the hidden size
P_RATIO = 0.25  # rows p of a FAN layer over its width

T = TypeVar("T")


class FANLayer(nn.Module):
    """A FAN layer [..., h] -> [..., h]: cos p, sin p and `activation(g)` of the rows p and g of one linear map."""

    def __init__(self, size: int, activation: Callable[[Tensor], Tensor] = lambda g: g) -> None:
        super().__init__()
        periodic = int(P_RATIO * size)
        self.sizes, self.activation = [periodic, size - 2 * periodic], activation
        self.linear = nn.Linear(size, sum(self.sizes))

    def forward(self, x: Tensor) -> Tensor:
        """[…, h] -> […, h]."""
        p, g = self.linear(x).split(self.sizes, dim=-1)
        return torch.cat([p.cos(), p.sin(), self.activation(g)], dim=-1)


def small_fanformer(num_layers: int, hidden_size: int, num_heads: int, vocab_size: int) -> FANformerConfig:
    """Return a FANformer of these sizes, without vocabulary padding, which the model for transformers does not have."""
    return FANformerConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=FFN_RATIO * hidden_size,
        num_attention_heads=num_heads,
        vocab_size=vocab_size,
        make_vocab_size_divisible_by=1,
    )


def twins(config: FANformerConfig) -> dict[str, FANformerConfig]:
    """Return the Transformer of a FANformer's shape, and the FANformer with this Transformer's number of parameters."""
    return {TRANSFORMER: as_transformer(config), SAME_PARAMETERS: with_same_parameters(config, multiple=1)}


def seeded(seed: int, make: Callable[[], T]) -> T:
    """Return `make()`, called with torch's random generator seeded; the generator's state is restored after it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def fresh_model(config: FANformerConfig, seed: int) -> FANformerForCausalLM:
    """Return a model with random weights of a seed, in float32."""
    return seeded(seed, lambda: FANformerForCausalLM(to_huggingface_config(config)))
