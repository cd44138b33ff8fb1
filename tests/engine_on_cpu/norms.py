"""RMSNorm of the stand-in: statistics and products in float32, the output rounded once."""

from typing import Any

import torch
from torch import Tensor

from tests.engine_on_cpu import fp8
from tests.engine_on_cpu.number_types import to_torch


def _scale(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1.0 if zero_centered else weight.float()


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """x / rms(x) * weight [n, h], no mean, and 1 / rms(x) [n]."""
    x = input.float()
    inverse_n = torch.rsqrt(x.square().mean(-1) + eps)
    normed = x * inverse_n.unsqueeze(-1) * _scale(weight, zero_centered_gamma)
    dtype = to_torch(otype)
    if quantizer is None:
        if ln_out is None:
            return [normed.to(dtype), None, inverse_n]
        ln_out.copy_(normed)
        return [ln_out, None, inverse_n]
    # The kernel writes FP8 by itself where the scale is known before (delayed); else its output is cast afterwards.
    source = normed if fp8.has_scale_before(quantizer) else normed.to(dtype)
    return [fp8.quantize(source, quantizer, ln_out, dtype=dtype), None, inverse_n]


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, inverse_n: Tensor, weight: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """Gradients of x and of the weight."""
    normed = x.float() * inverse_n.unsqueeze(-1)
    scaled = grad.float() * _scale(weight, zero_centered_gamma)
    projection = (scaled * normed).mean(-1, keepdim=True)
    grad_x = (scaled - normed * projection) * inverse_n.unsqueeze(-1)
    grad_weight = (grad.float() * normed).flatten(0, -2).sum(0)
    return [grad_x.to(x.dtype), grad_weight.to(weight.dtype)]
