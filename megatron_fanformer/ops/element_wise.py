"""Element-wise functions of a layer: SwiGLU and RMSNorm, with gradients written by hand; rotary positions.

On a CPU each operation of PyTorch is a pass over memory, and automatic differentiation makes more passes than needed.
In float32 outputs equal those of PyTorch's operations bit for bit. Gradients are summed in another order.

Shapes: h hidden size, f inner size of the MLP, s sequence, b micro batch, n heads, d head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_and_up: Tensor) -> Tensor:
    """Return silu(gate) * up, [..., f], of [gate | up], [..., 2 f]."""
    return _SwiGLU.apply(gate_and_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_and_up)
        gate, up = gate_and_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_and_up,) = ctx.saved_tensors
        gate, up = gate_and_up.chunk(2, dim=-1)
        grad_both = torch.empty_like(gate_and_up)
        grad_gate, grad_up = grad_both.chunk(2, dim=-1)
        torch.mul(grad, up, out=grad_up)  # for now, the gradient of silu(gate)
        torch.ops.aten.silu_backward(grad_up, gate, grad_input=grad_gate)
        torch.ops.aten.silu(gate, out=grad_up)
        grad_up.mul_(grad)
        return grad_both


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last axis, [..., h]; statistics are in float32 at least."""
    if x.device.type == "cpu":
        return _RMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)  # one kernel on a GPU


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_high = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = x_high.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x_high * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        high, size = scale.dtype, x.shape[-1]
        products = (grad.to(high) * x).view(-1, size)
        scales = scale.view(-1)
        grad_weight = scales @ products
        # The gradient through the mean square is a multiple of x, by this factor.
        along_x = (products @ weight.to(high)).mul_(scales.pow(3)).div_(-size)
        grad_x = (grad * weight).to(high).mul_(scale).addcmul_(x.to(high), along_x.view_as(scale))
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Return x * cos + rotate_half(x) * sin: each pair (i, i + d / 2) of the last axis is rotated by an angle.

    Args:
        x: [s, b, n, d].
        angles: [s, 1, 1, d] in float32; both halves of the last axis are equal.
    """
    half = angles[..., : angles.shape[-1] // 2]
    cos, sin = half.cos().to(x.dtype), half.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    # Not by addcmul, which rounds once less: the outputs must equal megatron-core's bit for bit.
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
