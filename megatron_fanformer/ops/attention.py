"""Attention: causal attention on a CPU by this project's kernel, any other by torch's.

Shapes: s sequence, b micro batch, n heads, d head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fanformer.ops import cpu_kernels


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Return softmax(q k^T * scale) v, [b, n, s, d], of queries, keys and values [b, n, s, d].

    Args:
        scale: by default 1 / sqrt(d).
        is_causal: whether a query sees only the keys up to the query's own position.
        attn_mask: True where a query sees a key, [queries, keys].
    """
    if is_causal and cpu_kernels.can_take_attention(query, key, value):
        return _CausalAttention.apply(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
    return F.scaled_dot_product_attention(query, key, value, scale=scale, is_causal=is_causal, attn_mask=attn_mask)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        out, log_sums = cpu_kernels.causal_attention(query, key, value, scale)
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *qkv, out, log_sums = ctx.saved_tensors
        return *cpu_kernels.causal_attention_backward(tuple(qkv), out, log_sums, grad, ctx.scale), None  # scale: None
