"""The FAN activation of one rank, [p | g] -> [cos p, sin p, g], and its gradient, by a Triton kernel or in PyTorch.

Tensors on a GPU use the kernel (`fan_activation_triton`) if Triton is installed, all others the PyTorch implementation
below. Tests compare the two: in bfloat16, few elements differ, by a unit in the last place.

Shapes: t tensor parallel ranks, n tokens, r = P + G rows of one output's map on one rank, w = t (2P + G) the output's
width, v = t G.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fanformer.ops.triton_support import has_triton, triton_takes


class Implementation(NamedTuple):
    """A way to compute the activation."""

    activate: Callable[[Tensor, Tensor, int, bool], Tensor | None]
    """(pre_tnr, x_f_nw, P, gelu): writes the output to x_f_nw; with gelu, returns g, [n, v], for its gradient."""
    differentiate: Callable[[Tensor, Tensor, Tensor | None, Tensor, int], None]
    """(x_f_nw, grad_nw, g_nv, grad_pre_tnr, P): writes the gradient of p | g to grad_pre_tnr."""


def implementation_for(tensor: Tensor) -> Implementation:
    """Return the kernel if it can run on this tensor, else the PyTorch implementation."""
    return (_triton_kernel() or EAGER) if triton_takes(tensor) else EAGER


def _triton_kernel() -> Implementation | None:
    if not has_triton(warning_start="the FAN activation runs"):
        return None
    from megatron_fanformer.ops import fan_activation_triton

    return Implementation(fan_activation_triton.activate, fan_activation_triton.differentiate)


def activate(pre_tnr: Tensor, x_f_nw: Tensor, periodic: int, gelu: bool) -> Tensor | None:
    """Write [cos p, sin p, g] to `x_f_nw`; with `gelu`, write GELU(g) for g, and return g, which the gradient needs."""
    phase_ntp, g_ntg = pre_tnr.transpose(0, 1).split([periodic, pre_tnr.shape[-1] - periodic], dim=-1)
    cos_ntp, sin_ntp, out_ntg = _views_by_rank(x_f_nw, len(pre_tnr), periodic)
    # A contiguous float32 copy to overwrite: PyTorch's cos and sin are slow on a part of each row.
    phase_ntp = _wide_copy(phase_ntp)
    cos_ntp.copy_(phase_ntp.cos())
    sin_ntp.copy_(phase_ntp.sin_())
    out_ntg.copy_(F.gelu(g_ntg) if gelu else g_ntg)
    return g_ntg.flatten(1).contiguous() if gelu else None


def differentiate(x_f_nw: Tensor, grad_nw: Tensor, g_nv: Tensor | None, grad_pre_tnr: Tensor, periodic: int) -> None:
    """Write the gradient of p | g to `grad_pre_tnr`, in PyTorch: d p = d sin p * cos p - d cos p * sin p."""
    ranks = len(grad_pre_tnr)
    grad_cos, grad_sin, grad_g = _views_by_rank(grad_nw, ranks, periodic)
    cos_ntp, sin_ntp, _ = _views_by_rank(x_f_nw, ranks, periodic)
    out_p, out_g = grad_pre_tnr.transpose(0, 1).split([periodic, grad_pre_tnr.shape[-1] - periodic], dim=-1)
    if grad_nw.dtype == _wide_dtype(grad_nw):
        torch.mul(grad_sin, cos_ntp, out=out_p)
        out_p.sub_(grad_cos * sin_ntp)
    else:  # 16-bit tensors: computed in float32, and rounded once
        high = _wide_copy(grad_sin).mul_(_wide_copy(cos_ntp))
        out_p.copy_(high.sub_(_wide_copy(grad_cos).mul_(_wide_copy(sin_ntp))))
    out_g.copy_(grad_g if g_nv is None else torch.ops.aten.gelu_backward(grad_g, g_nv.view(grad_g.shape)))


EAGER = Implementation(activate, differentiate)
"""The activation in PyTorch, on any device and in any float type."""


def _wide_dtype(tensor: Tensor) -> torch.dtype:
    """Return the tensor's type or float32, whichever is wider: the type to compute in."""
    return torch.promote_types(tensor.dtype, torch.float32)


def _wide_copy(tensor: Tensor) -> Tensor:
    return tensor.to(_wide_dtype(tensor), memory_format=torch.contiguous_format, copy=True)


def _views_by_rank(x_f_nw: Tensor, ranks: int, periodic: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return cos p [n, t, P], sin p [n, t, P] and g [n, t, G] as views of an output or of its gradient."""
    whole = ranks * periodic
    parts = x_f_nw.split([whole, whole, x_f_nw.shape[-1] - 2 * whole], dim=-1)
    cos, sin, g = (part.unflatten(-1, (ranks, part.shape[-1] // ranks)) for part in parts)
    return cos, sin, g
