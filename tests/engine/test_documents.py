"""Attention within documents by the Engine's variable-length attention, against the local layers'."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.passes import one_pass, ranks_of, worst_gradient
from tests.engine.test_layers import BOUNDS, SPREAD

RunOnRanks = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param("one rank", torch.bfloat16, id="fused attention"),
        pytest.param("one rank", torch.float32, id="unfused attention", marks=pytest.mark.full),
        pytest.param(SPREAD, torch.float32, id="spread", marks=pytest.mark.full),
    ],
)
def test_same_as_the_local_layers(run_on_engine_ranks: RunOnRanks, layout: str, dtype: torch.dtype) -> None:
    def passed(implementation: str, layout: str, within_documents: bool) -> list[Any]:
        arguments = (implementation, "paper", layout, None, dtype, (), 1, within_documents)
        return run_on_engine_ranks(ranks_of(layout), one_pass, *arguments)

    expected, ranks = passed("local", "one rank", True), passed("transformer_engine", layout, True)
    across = passed("transformer_engine", layout, False)
    same_loss, same_gradient = BOUNDS[dtype]
    assert ranks[0].loss == pytest.approx(expected[0].loss, abs=same_loss, rel=0)
    assert worst_gradient(ranks, expected) <= same_gradient
    assert worst_gradient(across, expected) > 5 * same_gradient  # what a bound that is not heeded would change
