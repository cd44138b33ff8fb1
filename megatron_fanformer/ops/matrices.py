"""Operations on whole matrices: norms, products that are added to sums of a wider type, orthogonalization for Muon.

Shapes: n tokens, o a weight's output rows, h its input width.
"""

import functools

import torch
from torch import Tensor

TERMS = 4096
"""Number of squares that are summed in float32. On a CPU, torch's norm sums all squares in float32, and a large sum
loses small terms: the norm of 25 million numbers came out 1.4e-3 too small (torch 2.13, any instruction set). If sums
of 4,096 squares are added up in float64, the error is 1e-9, in the same time."""
ROWS_A_BLOCK = 4096
"""Rows of a product that is computed apart and then added, if it cannot be added to a float32 sum at once."""
PROBE_SIZE = 16  # every kernel takes multiples of this
# Newton-Schulz steps of Keller Jordan's Muon (2024), as in torch.optim.Muon and Megatron-LM. The polynomial is steep at
# 0, and leaves singular values between about 0.7 and 1.2 in place of 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7


def norm(tensor: Tensor) -> Tensor:
    """Return the Euclidean norm of all elements, a float64 scalar on the tensor's device; `TERMS` says why by parts."""
    flat = tensor.detach().reshape(-1)
    whole = flat.numel() // TERMS * TERMS
    parts = flat[:whole].view(-1, TERMS), flat[None, whole:]  # rows of TERMS elements, and a shorter row of the rest
    norms = [torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).double() for rows in parts]
    return torch.linalg.vector_norm(torch.cat(norms))


def add_product(sum_oh: Tensor, grad_no: Tensor, x_nh: Tensor) -> None:
    """Add grad^T x to `sum_oh` in place; terms are summed in the type of `sum_oh` where torch can do that."""
    if sum_oh.dtype == x_nh.dtype:
        sum_oh.addmm_(grad_no.t(), x_nh)
    elif adds_to_wider(sum_oh.dtype, x_nh.dtype, sum_oh.device):
        torch.addmm(sum_oh, grad_no.t(), x_nh, out_dtype=sum_oh.dtype, out=sum_oh)
    else:  # in blocks of rows, so that the products take little memory
        for sums, grad in zip(sum_oh.split(ROWS_A_BLOCK), grad_no.split(ROWS_A_BLOCK, dim=1), strict=True):
            sums.add_(grad.t() @ x_nh)


@functools.cache
def adds_to_wider(wide: torch.dtype, narrow: torch.dtype, device: torch.device) -> bool:
    """Return whether torch can add a product to a sum of a wider type in place, by trying it once on small matrices.

    On CUDA it can since November 2025 (pytorch/pytorch#167931); before, it raised an error, or lost the sum.
    """
    sums = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=wide, device=device)
    ones = torch.ones(PROBE_SIZE, PROBE_SIZE, dtype=narrow, device=device)
    try:
        torch.addmm(sums, ones, ones, out_dtype=wide, out=sums)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool((sums == 1 + PROBE_SIZE).all())


def orthogonalize(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return about U V^T of a matrix U S V^T, by `steps` Newton-Schulz steps; products and result are in `dtype`."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    matrix = matrix.to(dtype)  # ranks exchange matrices in this type: so one rank computes the same numbers as many
    length = torch.linalg.vector_norm(matrix, dtype=torch.float32).clamp_min(EPSILON)
    x = (matrix.t() if is_tall else matrix) / length  # now no singular value is above 1
    first, third, fifth = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.t()
        # first x + (third gram + fifth gram^2) x
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.t() if is_tall else x
