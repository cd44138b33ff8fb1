"""The orthogonal factor of a matrix by Newton-Schulz steps, as Muon uses it.

Source: Keller Jordan's Muon (2024), whose coefficients and number of steps torch.optim.Muon and Megatron-LM share. They
rise steeply at 0, and leave singular values between about 0.7 and 1.2 in place of 1.
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7


def orthogonalize(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return U V^T of U S V^T, of a matrix [m, n] of any type; in `dtype`, of which its products are, too."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    matrix = matrix.to(dtype)  # as it is where ranks exchange it: one rank's numbers are those of many
    norm = torch.linalg.vector_norm(matrix, dtype=torch.float32).clamp_min(EPSILON)
    x = (matrix.t() if is_tall else matrix) / norm  # no singular value above 1
    first, third, fifth = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.t()
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.t() if is_tall else x
