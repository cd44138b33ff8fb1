"""Norms of many numbers, where a float32 sum would lose what is added to it."""

import pytest
import torch

from megatron_fanformer.ops.norms import TERMS, norm

ROUNDED = 1e-8  # relative: each part of 4,096 squares is rounded to float32 once, at random


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
