"""Transformer Engine's layers against the local ones: one pass of every variant, spread and not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.passes import LAYOUTS, VARIANTS, Pass, one_pass, ranks_of, worst_gradient

RunOnRanks = Callable[..., list[Any]]

# Norm of the difference of a gradient over its norm, and nats. float32: sums in other orders, formulas of other shapes.
FP32_GRADIENT, FP32_LOSS = 1e-5, 2e-6
# bf16: either implementation was off float32 by 2.1% in the worst gradient of these variants, and by 0.002 nats.
BF16_GRADIENT, BF16_LOSS = 0.04, 4e-3
BOUNDS = {torch.float32: (FP32_LOSS, FP32_GRADIENT), torch.bfloat16: (BF16_LOSS, BF16_GRADIENT)}
SPREAD = "tp2 sp, FAN sequence"
"""The layout of every variant in each run; the others are the paper's."""
DTYPES = [pytest.param(torch.float32, id="fp32"), pytest.param(torch.bfloat16, id="bf16")]


@pytest.fixture(scope="module")
def local(run_on_engine_ranks: RunOnRanks) -> Callable[[str, torch.dtype], list[Pass]]:
    """The local layers' pass on one rank, made when first asked for."""
    made: dict[Any, list[Pass]] = {}

    def of(variant: str, dtype: torch.dtype) -> list[Pass]:
        if (variant, dtype) not in made:
            made[variant, dtype] = run_on_engine_ranks(1, one_pass, "local", variant, "one rank", None, dtype)
        return made[variant, dtype]

    return of


CASES = [
    pytest.param(
        variant, layout, marks=() if variant == "paper" or layout in ("one rank", SPREAD) else pytest.mark.full
    )
    for variant in VARIANTS
    for layout in LAYOUTS
    if not (variant == "Transformer" and "FAN" in layout)  # which has no FAN map
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("variant", "layout"), CASES)
def test_same_model_as_the_local_layers(
    run_on_engine_ranks: RunOnRanks,
    local: Callable[[str, torch.dtype], list[Pass]],
    variant: str,
    layout: str,
    dtype: torch.dtype,
) -> None:
    expected = local(variant, dtype)
    ranks = run_on_engine_ranks(ranks_of(layout), one_pass, "transformer_engine", variant, layout, None, dtype)
    same_loss, same_gradient = BOUNDS[dtype]
    assert {rank.loss for rank in ranks} == {ranks[0].loss}
    assert ranks[0].loss == pytest.approx(expected[0].loss, abs=same_loss, rel=0)
    assert worst_gradient(ranks, expected) <= same_gradient


@pytest.mark.parametrize("norm", ["layers.0.input_layernorm.weight", "layers.1.pre_mlp_layernorm.weight"])
@pytest.mark.parametrize("variant", ["paper", "qk_and_v", "Transformer"])
def test_no_norm_is_dropped(run_on_engine_ranks: RunOnRanks, variant: str, norm: str) -> None:
    """A scaled norm changes the output, and to what the local layers make of it."""

    def passes(implementation: str, scaled: str | None) -> list[Pass]:
        return run_on_engine_ranks(1, one_pass, implementation, variant, "one rank", None, torch.float32, scaled)

    plain, scaled, expected = (
        passes("transformer_engine", None),
        passes("transformer_engine", norm),
        passes("local", norm),
    )
    assert abs(plain[0].loss - scaled[0].loss) > 100 * FP32_LOSS
    assert scaled[0].loss == pytest.approx(expected[0].loss, abs=FP32_LOSS, rel=0)
    assert worst_gradient(scaled, expected) <= FP32_GRADIENT
