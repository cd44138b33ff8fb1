"""Logits of a reference checkpoint, from the reference's own tensors: its equations, one layer's weights at a time.

Source: the paper's equations and the facts in tests/reference/README.md. In float32.

Shapes: b batch, s sequence, h hidden size, n query heads, k query groups, d head size, v padded vocabulary.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fanformer.model.config import FANformerConfig

Load = Callable[[str], Tensor]


@torch.no_grad()
def reference_logits(config: FANformerConfig, load: Load, ids_bs: Tensor) -> Tensor:
    """Return logits [b, s, v] of ids [b, s].

    Args:
        load: returns the tensor of one of the reference's names, in float32.
    """
    x = F.embedding(ids_bs, load("transformer.wte.weight"))
    for layer in range(config.num_layers):

        def block(name: str, layer: int = layer) -> Tensor:
            return load(f"transformer.blocks.{layer}.{name}")

        x = x + _attention(config, block, _norm(config, x, block("attn_norm.weight")))
        up, gate = (_norm(config, x, block("ff_norm.weight")) @ block("ff_proj.weight").T).chunk(2, dim=-1)
        x = x + (F.silu(gate) * up) @ block("ff_out.weight").T
    head = "transformer.ff_out.weight" if config.untie_embeddings_and_output_weights else "transformer.wte.weight"
    return _norm(config, x, load("transformer.ln_f.weight")) @ load(head).T


def _norm(config: FANformerConfig, x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.layernorm_epsilon) * weight


def _fan(config: FANformerConfig, block: Load, name: str, x: Tensor, width: int) -> Tensor:
    """[b, s, h] -> [b, s, width]; P follows from the map's rows, P + G = width - P."""
    bias = block(f"{name}.input_linear.bias") if config.fan.bias else None
    rows = F.linear(x, block(f"{name}.input_linear.weight"), bias)
    periodic = width - rows.shape[-1]
    phase, linear = rows[..., :periodic], rows[..., periodic:]
    return torch.cat([phase.cos(), phase.sin(), F.gelu(linear) if config.fan.activation == "gelu" else linear], dim=-1)


def _attention(config: FANformerConfig, block: Load, x: Tensor) -> Tensor:
    qkv = config.placement.reference_qkv(config, block, x, partial(_fan, config, block))
    q, k, v = (part.unflatten(-1, (-1, config.kv_channels)).transpose(1, 2) for part in qkv)
    q, k = _rotate(config, q), _rotate(config, k)
    share = config.num_attention_heads // config.query_groups
    k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
    scores = q @ k.transpose(-1, -2) / config.kv_channels**0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    context = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
    return context.transpose(1, 2).flatten(2) @ block("attn_out.weight").T


def _rotate(config: FANformerConfig, x: Tensor) -> Tensor:
    """Rotary positions on the halves of each head [b, n, s, d]."""
    exponents = torch.arange(0, config.kv_channels, 2, dtype=torch.float32) / config.kv_channels
    angles = torch.outer(torch.arange(x.shape[-2], dtype=torch.float32), 1.0 / config.rotary_base**exponents)
    cos, sin = (part.repeat(1, 2) for part in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
