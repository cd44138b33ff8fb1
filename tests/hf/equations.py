"""A FANformer written from the paper's equations, in float64, for weights under transformers' names.

It shares no code with the model, and computes one sequence at a time, without a cache or padding.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def logits(weights: Mapping[str, Tensor], ids: Tensor, *, heads: int, gelu: bool, eps: float = 1e-6) -> Tensor:
    """Logits [b, s, v] of ids [b, s]; the shapes of the weights say everything else."""
    exact = {name: weight.double() for name, weight in weights.items()}
    x = exact["model.embed_tokens.weight"][ids]
    for layer in range(1 + max(int(name.split(".")[2]) for name in exact if ".layers." in name)):
        prefix = f"model.layers.{layer}."
        own = {name.removeprefix(prefix): weight for name, weight in exact.items() if name.startswith(prefix)}
        x = x + _attention(own, _norm(x, own["input_layernorm.weight"], eps), heads, gelu)
        y = _norm(x, own["post_attention_layernorm.weight"], eps)
        inside = F.silu(y @ own["mlp.gate_proj.weight"].T) * (y @ own["mlp.up_proj.weight"].T)
        x = x + inside @ own["mlp.down_proj.weight"].T
    return _norm(x, exact["model.norm.weight"], eps) @ exact["lm_head.weight"].T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def _fan(own: Mapping[str, Tensor], name: str, x: Tensor, width: int, gelu: bool) -> Tensor:
    """[cos p | sin p | g]: of P + G rows with 2 P + G = width, P are `width` less the rows."""
    rows = x @ own[f"{name}.weight"].T + own.get(f"{name}.bias", torch.zeros(()))
    p, g = rows[..., : width - rows.shape[-1]], rows[..., width - rows.shape[-1] :]
    activated = 0.5 * g * (1 + torch.erf(g / math.sqrt(2))) if gelu else g
    return torch.cat([p.cos(), p.sin(), activated], dim=-1)


def _attention(own: Mapping[str, Tensor], x: Tensor, heads: int, gelu: bool) -> Tensor:
    width = x.shape[-1]
    x_f = _fan(own, "self_attn.fan", x, width, gelu) if "self_attn.fan.weight" in own else x
    queries, keys = (x_f @ own[f"self_attn.{name}_proj.weight"].T for name in "qk")
    if "self_attn.v_fan.weight" in own:
        values = _fan(own, "self_attn.v_fan", x, keys.shape[-1], gelu)
    else:
        values = x_f @ own["self_attn.v_proj.weight"].T
    size = width // heads
    groups = keys.shape[-1] // size
    q, k, v = (part.unflatten(-1, (-1, size)) for part in (queries, keys, values))
    out = [
        _head(_turned(q)[:, :, n], _turned(k)[:, :, n * groups // heads], v[:, :, n * groups // heads])
        for n in range(heads)
    ]
    return torch.cat(out, dim=-1) @ own["self_attn.o_proj.weight"].T


def _turned(x: Tensor) -> Tensor:
    """Pairs (i, i + d/2) of each head [b, s, n, d] as complex numbers, turned by position * 10000^(-2i/d)."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.outer(torch.arange(x.shape[1], dtype=torch.float64), rates)[:, None]
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(turn), turn)
    return torch.cat([turned.real, turned.imag], dim=-1)


def _head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v
