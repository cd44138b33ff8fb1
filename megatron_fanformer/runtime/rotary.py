"""Rotary position embedding with its gradient written out: a few passes over memory in place of a dozen."""

from typing import Any

import torch
from torch import Tensor


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin, of pairs (i, i + d / 2) of the last axis.

    Args:
        x: [s, b, n, d].
        angles: [s, 1, 1, d] in float32, the same for both of a pair.
    """
    half = angles[..., : angles.shape[-1] // 2]
    return _Rotation.apply(x, half.cos().to(x.dtype), half.sin().to(x.dtype))


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair turned by its angle; the other way round with -sin, which is the gradient of that."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (first, second), (out_first, out_second) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first)
    torch.mul(second, cos, out=out_second)
    # addcmul_ would round once less: the outputs are to be megatron-core's bit for bit
    out_first.sub_(second * sin)
    out_second.add_(first * sin)
    return out
