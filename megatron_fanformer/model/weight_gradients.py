"""Weight gradients, returned to autograd or added to the main gradient inside the product.

Shapes: n tokens, o a weight's output rows, h its input width.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_fanformer.ops.matrices import add_product


def weight_gradient(weight_oh: Any, grad_no: Tensor, x_nh: Tensor, *, fuses_accumulation: bool) -> Tensor | None:
    """Return backward's result for a weight: its gradient, or a stand-in if that is in `main_grad` already."""
    if not (fuses_accumulation and hasattr(weight_oh, "main_grad")):
        return grad_no.t().matmul(x_nh)
    add_product(weight_oh.main_grad, grad_no, x_nh)
    return stand_in(weight_oh)


def stand_in(weight_oh: Any) -> Tensor | None:
    """Return a stand-in where the gradient is in `main_grad` already, so that the weight is marked ready for reduction.

    By Megatron's own protocol of fused accumulation it is a tensor of any content, which a flag keeps from being read.
    A weight that is also this stage's embedding has a gradient from there, which must be read: it gets none from here.
    """
    if getattr(weight_oh, "zero_out_wgrad", False):
        return None
    weight_oh.grad_added_to_main_grad = True
    return torch.empty_like(weight_oh)
