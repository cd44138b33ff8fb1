"""What a configuration asks of a machine that has no GPU: refused with the rule and the remedy."""

import sys
from typing import Any

import pytest
import torch

from megatron_fanformer.model.config import FANConfig
from megatron_fanformer.model.dtypes import DTYPES
from megatron_fanformer.model.kernels import KernelsConfig
from megatron_fanformer.runtime import device
from megatron_fanformer.runtime.cuda_on_cpu import FUSED_GRADIENT_KERNEL
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.train.machine_rules import backend_problems, engine_problems, kernel_problems
from tests.tiny import tiny_model


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_graphs_need_a_gpu() -> None:
    (problem,) = kernel_problems(KernelsConfig(cuda_graph_impl="local"))
    assert "kernels.cuda_graph_impl is local, but there is no GPU" in problem


@pytest.mark.parametrize(
    ("backend", "value", "count"), [("auto", "1", 0), ("auto", "0", 1), ("fused", "1", 0), ("unfused", "1", 1)]
)
def test_the_environment_agrees_on_attention(
    backend: Any, value: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in device.ATTENTION_SWITCHES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NVTE_FUSED_ATTN", value)
    problems = kernel_problems(KernelsConfig(attention_backend=backend))
    assert ["unset it, and choose by that field" in problem for problem in problems] == [True] * count


@pytest.mark.parametrize(("transformer_impl", "count"), [("auto", 0), ("local", 1)])
def test_fused_gradients_are_the_engines_or_apexs(
    transformer_impl: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)
    monkeypatch.delitem(sys.modules, FUSED_GRADIENT_KERNEL)  # what stands in for apex's on a CPU
    kernels = KernelsConfig(gradient_accumulation_fusion=True, transformer_impl=transformer_impl)
    assert len(list(kernel_problems(kernels))) == count


@pytest.mark.parametrize(
    ("has_engine", "parallel", "kernels", "dtype", "part"),
    [
        (True, {"context_parallel_size": 2}, {}, "fp32", "context_parallel_size is 2 in float32"),
        (True, {"context_parallel_size": 2}, {}, "bf16", None),
        (True, {"context_parallel_size": 2}, {"transformer_impl": "local"}, "fp32", None),
        (False, {"context_parallel_size": 2}, {}, "fp32", None),
        (True, {"context_parallel_size": 2, "cp_comm_type": "a2a"}, {}, "bf16", None),
        (True, {"context_parallel_size": 2, "cp_comm_type": "a2a"}, {}, "fp32", None),
        (False, {"context_parallel_size": 2, "cp_comm_type": "a2a"}, {}, "bf16", None),
        (False, {"context_parallel_size": 2, "cp_comm_type": "p2p"}, {}, "bf16", "cp_comm_type is p2p"),
        (False, {"context_parallel_size": 2, "cp_comm_type": "all_gather"}, {}, "bf16", None),
        (False, {}, {"fused_single_qkv_rope": True}, "bf16", "whose layers are not in use here"),
        (True, {}, {"fused_single_qkv_rope": True}, "bf16", "at model.fan.placement qk_and_v"),
    ],
)
def test_what_the_layers_at_hand_cannot_compute(
    has_engine: bool,
    parallel: dict[str, Any],
    kernels: dict[str, Any],
    dtype: str,
    part: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "has_transformer_engine", lambda: has_engine)
    model = tiny_model(fan=FANConfig(placement="qk_and_v"))
    found = engine_problems(model, ParallelConfig(**parallel), KernelsConfig(**kernels), DTYPES[dtype])
    assert [part in problem for problem in found] == ([] if part is None else [True])


@pytest.mark.parametrize(("transformer_impl", "count"), [("auto", 1), ("local", 0)])
def test_fan_layers_for_the_mlp_are_local_ones(
    transformer_impl: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "has_transformer_engine", lambda: True)
    model = tiny_model(fan=FANConfig(placement="ffn"))
    kernels = KernelsConfig(transformer_impl=transformer_impl)
    found = engine_problems(model, ParallelConfig(), kernels, DTYPES["bf16"])
    assert ["model.fan.placement is ffn" in problem for problem in found] == [True] * count


def test_nccl_is_for_gpus() -> None:
    (problem,) = backend_problems(ParallelConfig(), KernelsConfig(), "nccl", "cpu")
    assert "distributed_backend is nccl, but this run is on the CPU" in problem


@pytest.mark.parametrize(
    ("has_engine", "fields", "part"),
    [
        (False, {"pipeline_model_parallel_size": 2}, "parallel.pipeline_model_parallel_size to 1"),
        (True, {"context_parallel_size": 2}, "parallel.cp_comm_type to all_gather"),
        (True, {"context_parallel_size": 2, "cp_comm_type": "p2p"}, "parallel.cp_comm_type to all_gather"),
        (True, {"context_parallel_size": 2, "cp_comm_type": "all_gather"}, None),
        (True, {"context_parallel_size": 2, "cp_comm_type": "a2a"}, None),
        (False, {"context_parallel_size": 2}, None),  # the local layers gather
        (True, {"tensor_model_parallel_size": 2}, None),
        (True, {"overlap_grad_reduce": True}, "set it and overlap_param_gather to null"),
    ],
)
def test_gloo_sends_nothing_between_gpus(
    has_engine: bool, fields: dict[str, Any], part: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "has_transformer_engine", lambda: has_engine)
    parallel, kernels = ParallelConfig(**fields), KernelsConfig()
    found = backend_problems(parallel, kernels, "gloo", "cuda")
    assert [part in problem for problem in found] == ([] if part is None else [True])
    assert backend_problems(parallel, kernels, "nccl", "cuda") == []
    assert backend_problems(parallel, kernels, "gloo", "cpu") == []
