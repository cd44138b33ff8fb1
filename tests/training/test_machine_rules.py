"""What a configuration asks of a machine that has no GPU: refused with the rule and the remedy."""

from typing import Any

import pytest
import torch

from megatron_fanformer.model.kernels import KernelsConfig
from megatron_fanformer.runtime import device
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.training.layout_rules import graph_problems
from megatron_fanformer.training.machine_rules import kernel_problems


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"gradient_accumulation_fusion": True}, "fused_weight_gradient_mlp_cuda does not import"),
        ({"cuda_graph_impl": "local"}, "kernels.cuda_graph_impl is local, but there is no GPU"),
    ],
)
def test_kernels_that_need_a_gpu(fields: dict[str, Any], part: str) -> None:
    (problem,) = kernel_problems(KernelsConfig(**fields))
    assert part in problem


@pytest.mark.parametrize(("transformer_impl", "count"), [("auto", 0), ("local", 1)])
def test_fused_gradients_are_the_engines_or_apexs(
    transformer_impl: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)
    kernels = KernelsConfig(gradient_accumulation_fusion=True, transformer_impl=transformer_impl)
    assert len(kernel_problems(kernels)) == count


def test_a_layers_graph_is_not_recomputed_as_a_whole() -> None:
    full = ParallelConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    (problem,) = graph_problems(full, KernelsConfig(cuda_graph_impl="local"))
    assert "cannot be recomputed as a whole" in problem
    assert graph_problems(full, KernelsConfig()) == graph_problems(ParallelConfig(), KernelsConfig()) == []
