"""Products that are added to a gradient of a wider type, with torch's own operation and without it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_fanformer.ops import products
from megatron_fanformer.ops.products import add_product, adds_to_wider, mkl_product

ROUNDING = 2**-8  # of a bf16 product, where it is rounded before it is added


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
    """(None: a CPU's own, which raises.)"""
    if addmm is not None:
        monkeypatch.setattr(products.torch, "addmm", addmm)
    assert adds_to_wider(torch.float32, torch.bfloat16, torch.device("cpu")) is is_used
    sum_oh = torch.randn(5, 3)
    grad_no, x_nh = torch.randn(7, 5).bfloat16(), torch.randn(7, 3).bfloat16()
    expected = sum_oh + grad_no.float().t() @ x_nh.float()
    add_product(sum_oh, grad_no, x_nh)
    torch.testing.assert_close(sum_oh, expected, atol=16 * ROUNDING, rtol=0)  # products below 16


@pytest.mark.parametrize("tokens", [7, 300])
def test_without_it_the_sum_is_in_float32_where_mkl_has_matrix_units(tokens: int) -> None:
    """Of a part of a sum, from parts of rows; the other form rounds each product to bf16."""
    if mkl_product() is None:
        pytest.skip("torch has no MKL, or this CPU no bf16 matrix units (AMX)")
    sums, grads, xs = torch.randn(9, 40), torch.randn(tokens, 12).bfloat16(), torch.randn(tokens, 50).bfloat16()
    sum_oh, grad_no, x_nh = sums[2:7, :33], grads[:, 3:8], xs[:, 5:38]
    expected = sum_oh.double() + grad_no.double().t() @ x_nh.double()
    others = sums[:, 33:].clone()
    add_product(sum_oh, grad_no, x_nh)
    torch.testing.assert_close(sum_oh.double(), expected, atol=tokens * 2**-20, rtol=0)
    assert torch.equal(sums[:, 33:], others)
