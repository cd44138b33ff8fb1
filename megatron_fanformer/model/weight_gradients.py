"""Weight gradients, returned to autograd or added to the main gradient inside the product.

Shapes: n tokens, o a weight's output rows, h its input width.
"""

import functools
from typing import Any

import torch
from torch import Tensor

ROWS_A_BLOCK = 4096
"""Rows of a weight's gradient that are held twice where the product cannot add to a float32 one."""
PROBE_SIZE = 16  # a multiple that every kernel takes


def weight_gradient(weight_oh: Any, grad_no: Tensor, x_nh: Tensor, *, fuses_accumulation: bool) -> Tensor | None:
    """What backward returns for a weight: its gradient, or a stand-in if that is in `main_grad` by then."""
    if not (fuses_accumulation and hasattr(weight_oh, "main_grad")):
        return grad_no.t().matmul(x_nh)
    add_product(weight_oh.main_grad, grad_no, x_nh)
    return stand_in(weight_oh)


def stand_in(weight_oh: Any) -> Tensor | None:
    """What to return where the gradient is in `main_grad` already, so that the weight is marked as ready for reduction.

    By Megatron's own protocol of fused accumulation it is a tensor of any content, which a flag keeps from being read.
    A weight that is also this stage's embedding has a gradient from there, which must be read: it gets none from here.
    """
    if getattr(weight_oh, "zero_out_wgrad", False):
        return None
    weight_oh.grad_added_to_main_grad = True
    return torch.empty_like(weight_oh)


def add_product(sum_oh: Tensor, grad_no: Tensor, x_nh: Tensor) -> None:
    """Add the product of the first, transposed, and the second, with sums in the accumulator's type where possible."""
    if sum_oh.dtype == x_nh.dtype:
        sum_oh.addmm_(grad_no.t(), x_nh)
    elif adds_to_wider(sum_oh.dtype, x_nh.dtype, sum_oh.device):
        torch.addmm(sum_oh, grad_no.t(), x_nh, out_dtype=sum_oh.dtype, out=sum_oh)
    else:
        for sums, grad in zip(sum_oh.split(ROWS_A_BLOCK), grad_no.split(ROWS_A_BLOCK, dim=1), strict=True):
            sums.add_(grad.t() @ x_nh)


@functools.cache
def adds_to_wider(wide: torch.dtype, narrow: torch.dtype, device: torch.device) -> bool:
    """Whether torch can add a product to a sum of a wider type, in place: tried once, on a small one.

    It can on CUDA, since a change of November 2025 (pytorch/pytorch#167931); before it raised, or lost the sum.
    """
    sums = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=wide, device=device)
    ones = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=narrow, device=device)
    try:
        torch.addmm(sums, ones, ones, out_dtype=wide, out=sums)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool((sums == 1 + PROBE_SIZE).all())
