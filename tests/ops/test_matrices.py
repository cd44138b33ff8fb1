"""Norms, products added to a wider type, and orthogonal factors of matrices."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_fanformer.ops import matrices
from megatron_fanformer.ops.matrices import COEFFICIENTS, TERMS, add_product, adds_to_wider, norm, orthogonalize

ROUNDED = 1e-8  # relative: each part of 4,096 squares is rounded to float32 once, at random
ROUNDING = 2**-8  # of a bf16 product, where it is rounded before it is added
SAME = 1e-5  # of the largest element: five steps enlarge the rounding of small singular values by up to 3.4⁵


def test_of_millions_of_numbers() -> None:
    """As of an embedding's gradient: torch's own norm of these is 4e-4 too small on a CPU."""
    numbers = torch.randn(8_000_001, generator=torch.Generator().manual_seed(0))
    assert norm(numbers).item() == pytest.approx(numbers.double().norm().item(), rel=ROUNDED)


def test_a_gradient_is_clipped_by_such_a_norm() -> None:
    """megatron-core's, over parts of the model."""
    from megatron.core.optimizer import clip_grads

    parts = [torch.full((3_000_000,), 2.0), torch.full((7,), 1000.0)]
    whole, _ = clip_grads.l2_norm_impl(65536, None, [parts], False)
    assert whole.tolist() == pytest.approx([(12e6 + 7e6) ** 0.5], rel=2**-23)


@pytest.mark.parametrize("size", [0, 1, TERMS - 1, TERMS, TERMS + 1])
def test_of_any_size_type_and_stride(size: int) -> None:
    numbers = torch.randn(2, size, generator=torch.Generator().manual_seed(0))
    for some in (numbers, numbers.bfloat16(), numbers.t(), numbers[:, ::3]):
        assert norm(some).item() == pytest.approx(some.double().norm().item(), rel=1e-6)


@pytest.fixture
def unknown() -> Iterator[None]:
    adds_to_wider.cache_clear()
    yield
    adds_to_wider.cache_clear()


def in_float32(sums: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, **_: Any) -> torch.Tensor:
    return out.copy_(sums + a.float() @ b.float())


def without_the_sum(_: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor, **__: Any) -> torch.Tensor:
    return out.copy_(a.float() @ b.float())


@pytest.mark.parametrize(("addmm", "is_used"), [(in_float32, True), (without_the_sum, False), (None, False)])
def test_torchs_product_is_used_where_it_adds(
    monkeypatch: pytest.MonkeyPatch, unknown: None, addmm: Any, is_used: bool
) -> None:
    """(None: a CPU's own, which raises, and the product is rounded before it is added.)"""
    if addmm is not None:
        monkeypatch.setattr(matrices.torch, "addmm", addmm)
    assert adds_to_wider(torch.float32, torch.bfloat16, torch.device("cpu")) is is_used
    sum_oh = torch.randn(5, 3)
    grad_no, x_nh = torch.randn(7, 5).bfloat16(), torch.randn(7, 3).bfloat16()
    expected = sum_oh + grad_no.float().t() @ x_nh.float()
    add_product(sum_oh, grad_no, x_nh)
    torch.testing.assert_close(sum_oh, expected, atol=16 * ROUNDING, rtol=0)  # products below 16


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
