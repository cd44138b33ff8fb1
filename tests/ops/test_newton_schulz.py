"""Newton-Schulz steps against the polynomial that they apply to singular values, in float64."""

import pytest
import torch

from megatron_fanformer.ops.newton_schulz import COEFFICIENTS, orthogonalize

SAME = 1e-5  # of the largest element: five steps enlarge the rounding of small singular values by up to 3.4⁵


def exact(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """U p(S) V^T of the matrix over its norm, p applied so many times."""
    u, s, vh = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    first, third, fifth = COEFFICIENTS
    for _ in range(steps):
        s = first * s + third * s**3 + fifth * s**5
    return u * s @ vh


@pytest.mark.parametrize("shape", [(48, 48), (96, 32), (24, 80), (1, 40)], ids=str)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_it_is_the_polynomial_of_the_singular_values(shape: tuple[int, int], scale: float) -> None:
    matrix = scale * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found, expected = orthogonalize(matrix, 5, torch.float32), exact(matrix, 5)
    assert found.shape == matrix.shape
    assert (found - expected).abs().max() <= SAME * expected.abs().max()
    assert torch.linalg.svdvals(expected).min() > 0.6 and torch.linalg.svdvals(expected).max() < 1.3


def test_nothing_stays_nothing() -> None:
    assert not orthogonalize(torch.zeros(8, 5), 5, torch.float32).any()


@pytest.mark.parametrize("shape", [(96, 32), (24, 80)], ids=str)
def test_in_bf16_it_is_that_of_the_matrix_in_bf16(shape: tuple[int, int]) -> None:
    """Which is what ranks exchange; one rank alone has the matrix in float32."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalize(matrix, 5, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, orthogonalize(matrix.bfloat16(), 5, torch.bfloat16))
