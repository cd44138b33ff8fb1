"""Transformer Engine's layers against the local ones: one pass of every variant, spread and not, within documents."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_fanformer.model.config import torch_dtype
from tests.engine.passes import LAYOUTS, VARIANTS, Pass, one_pass, ranks_of, worst_gradient
from tests.small_runs import RunOnRanks

# Norm of the difference of a gradient over its norm, and nats. float32: sums in other orders, formulas of other shapes.
FP32_GRADIENT, FP32_LOSS = 1e-5, 2e-6
# bf16: either implementation was off float32 by 2.1% in the worst gradient of these variants, and by 0.002 nats.
BF16_GRADIENT, BF16_LOSS = 0.04, 4e-3
BOUNDS = {torch.float32: (FP32_LOSS, FP32_GRADIENT), torch.bfloat16: (BF16_LOSS, BF16_GRADIENT)}
SPREAD = "tp2 sp, FAN sequence"
"""The layout in which every variant is compared in each run; the others are the paper's."""


@pytest.fixture(scope="module")
def local(run_on_engine_ranks: RunOnRanks) -> Callable[[str, torch.dtype], list[Pass]]:
    """The local layers' pass on one rank, made when first asked for."""
    made: dict[Any, list[Pass]] = {}

    def of(variant: str, dtype: torch.dtype) -> list[Pass]:
        if (variant, dtype) not in made:
            made[variant, dtype] = run_on_engine_ranks(1, one_pass, "local", variant, "one rank", None, dtype)
        return made[variant, dtype]

    return of


def is_for_every_run(variant: str, layout: str, dtype: torch.dtype) -> bool:
    """The paper's variant in all layouts; each other one in both types and, but for the Transformer, both layouts."""
    own = {torch.float32: "one rank" if variant == "Transformer" else SPREAD, torch.bfloat16: "one rank"}
    return variant == "paper" or layout == own[dtype]


CASES = [
    pytest.param(
        *(variant, layout, dtype),
        id=f"{variant}-{layout}-{name}",
        marks=() if is_for_every_run(variant, layout, dtype) else pytest.mark.full,
    )
    for variant in VARIANTS
    for layout in LAYOUTS
    for name, dtype in ((name, torch_dtype(name)) for name in ("fp32", "bf16"))
    if not (variant == "Transformer" and "FAN" in layout)  # which has no FAN map
]


@pytest.mark.parametrize(("variant", "layout", "dtype"), CASES)
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


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param("one rank", torch.bfloat16, id="fused attention"),
        pytest.param("one rank", torch.float32, id="unfused attention", marks=pytest.mark.full),
        pytest.param(SPREAD, torch.float32, id="spread", marks=pytest.mark.full),
    ],
)
def test_attention_within_documents(run_on_engine_ranks: RunOnRanks, layout: str, dtype: torch.dtype) -> None:
    """By the Engine's variable-length attention."""

    def passed(implementation: str, layout: str, within_documents: bool) -> list[Any]:
        arguments = (implementation, "paper", layout, None, dtype, 1, within_documents)
        return run_on_engine_ranks(ranks_of(layout), one_pass, *arguments)

    expected, ranks = passed("local", "one rank", True), passed("transformer_engine", layout, True)
    across = passed("transformer_engine", layout, False)
    same_loss, same_gradient = BOUNDS[dtype]
    assert ranks[0].loss == pytest.approx(expected[0].loss, abs=same_loss, rel=0)
    assert worst_gradient(ranks, expected) <= same_gradient
    assert worst_gradient(across, expected) > 5 * same_gradient  # what a bound that is not heeded would change
