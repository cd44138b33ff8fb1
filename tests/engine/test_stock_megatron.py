"""Stock Megatron-LM's models from our specs, with Transformer Engine's layers: it computes what ours does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.model.test_stock_megatron import MODEL, MY_MODEL, MY_SPEC, NEEDS_TRAINING, stock_and_ours
from tests.stock_megatron import SPEC, STACK_SPEC
from tests.train.layouts import layout

SAME = 2e-5  # norm of the difference over the norm: the rotary embedding and SwiGLU are other kernels there


@pytest.mark.parametrize(
    ("tensor_parallel", "sequence_parallel"), [(1, False), (2, True), pytest.param(2, False, marks=pytest.mark.full)]
)
@pytest.mark.parametrize(
    ("model", "spec"),
    [(MODEL, SPEC), (MY_MODEL, MY_SPEC), pytest.param(MODEL, STACK_SPEC, marks=NEEDS_TRAINING)],
    ids=["paper", "own-module", "hybrid"],
)
def test_stock_megatron_computes_what_we_do(
    run_on_engine_ranks: Callable[..., list[Any]],
    model: Any,
    spec: list[str],
    tensor_parallel: int,
    sequence_parallel: bool,
) -> None:
    """Under sequence parallelism, too: stock Megatron's own final norm is the Engine's here."""
    parallel = layout(f"tp={tensor_parallel}", sequence_parallel=sequence_parallel)
    for stock, ours, epsilons in run_on_engine_ranks(
        tensor_parallel, stock_and_ours, model, parallel, spec, None, "cuda"
    ):
        assert stock.keys() == ours.keys()
        assert epsilons == [model.layernorm_epsilon] * 2
        for name, value in ours.items():
            difference = torch.linalg.vector_norm(stock[name].float() - value.float())
            assert difference <= SAME * torch.linalg.vector_norm(value.float()), name
