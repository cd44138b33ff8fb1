"""Operations on whole matrices: norms, products that are added to a wider type, the orthogonal factor of Muon.

Shapes: n tokens, o a weight's output rows, h its input width.
"""

import functools

import torch
from torch import Tensor

from megatron_fanformer.ops import cpu_kernels

TERMS = 4096
"""Squares of a float32 sum. torch's norm adds all of a tensor's in float32 on a CPU, which loses what is added to a
sum that has grown: the norm of 25 million numbers came out 1.4e-3 too small (torch 2.13, any instruction set). In parts
of 4,096, added up in float64, it is off by 1e-9, in the same time."""
ROWS_A_BLOCK = 4096
"""Rows of a weight's gradient that are held twice where the product cannot add to a float32 one."""
PROBE_SIZE = 16  # a multiple that every kernel takes
# Newton-Schulz steps of Keller Jordan's Muon (2024), as torch.optim.Muon and Megatron-LM have them. They rise steeply
# at 0, and leave singular values between about 0.7 and 1.2 in place of 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7


def norm(tensor: Tensor) -> Tensor:
    """Return the square root of the sum of all elements' squares, a float64 scalar on the tensor's device."""
    flat = tensor.detach().reshape(-1)
    whole = flat.numel() // TERMS * TERMS
    rows = flat[:whole].view(-1, TERMS), flat[None, whole:]
    norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float32).double() for part in rows]
    return torch.linalg.vector_norm(torch.cat(norms))


def add_product(sum_oh: Tensor, grad_no: Tensor, x_nh: Tensor) -> None:
    """Add the product of the second, transposed, and the third, with sums in the accumulator's type where possible."""
    if sum_oh.dtype == x_nh.dtype:
        sum_oh.addmm_(grad_no.t(), x_nh)
    elif adds_to_wider(sum_oh.dtype, x_nh.dtype, sum_oh.device):
        torch.addmm(sum_oh, grad_no.t(), x_nh, out_dtype=sum_oh.dtype, out=sum_oh)
    elif cpu_kernels.reaches_product(sum_oh, grad_no, x_nh):
        cpu_kernels.add_product(sum_oh, grad_no, x_nh)
    else:
        for sums, grad in zip(sum_oh.split(ROWS_A_BLOCK), grad_no.split(ROWS_A_BLOCK, dim=1), strict=True):
            sums.add_(grad.t() @ x_nh)


@functools.cache
def adds_to_wider(wide: torch.dtype, narrow: torch.dtype, device: torch.device) -> bool:
    """Return whether torch can add a product to a sum of a wider type, in place: tried once, on a small one.

    It can on CUDA, since a change of November 2025 (pytorch/pytorch#167931); before it raised, or lost the sum.
    """
    sums = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=wide, device=device)
    ones = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=narrow, device=device)
    try:
        torch.addmm(sums, ones, ones, out_dtype=wide, out=sums)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool((sums == 1 + PROBE_SIZE).all())


def orthogonalize(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return U V^T of U S V^T, of a matrix [m, n] of any type; in `dtype`, of which its products are, too."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    matrix = matrix.to(dtype)  # as it is where ranks exchange it: one rank's numbers are those of many
    length = torch.linalg.vector_norm(matrix, dtype=torch.float32).clamp_min(EPSILON)
    x = (matrix.t() if is_tall else matrix) / length  # no singular value above 1
    first, third, fifth = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.t() if is_tall else x
