"""Kernels, layers, backends and FP8 that a machine lacks are refused with the rule and the remedy."""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_fanformer.model.config import PRESETS, FANConfig, KernelsConfig, PrecisionConfig
from megatron_fanformer.runtime import device
from megatron_fanformer.runtime.cuda_on_cpu import FUSED_GRADIENT_KERNEL
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.train.machine_rules import (
    backend_problems,
    fp8_machine_problems,
    fp8_problems,
    has_engine,
    kernel_problems,
    layer_problems,
)
from tests.tiny import tiny_model
from tests.train.layouts import layout


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
    ("is_installed", "placement", "parallel", "kernels", "dtype", "part"),
    [
        (True, "qkv", {"context_parallel_size": 2}, {}, "fp32", "context_parallel_size is 2 in float32"),
        (True, "qkv", {"context_parallel_size": 2}, {}, "bf16", None),
        (True, "qkv", {"context_parallel_size": 2}, {"transformer_impl": "local"}, "fp32", None),
        (False, "qkv", {"context_parallel_size": 2}, {}, "fp32", None),
        (True, "qkv", {"context_parallel_size": 2, "cp_comm_type": "a2a"}, {}, "fp32", None),
        (False, "qkv", {"context_parallel_size": 2, "cp_comm_type": "p2p"}, {}, "bf16", "cp_comm_type is p2p"),
        (False, "qkv", {}, {"fused_single_qkv_rope": True}, "bf16", "whose layers are not in use here"),
        (True, "qk_and_v", {}, {"fused_single_qkv_rope": True}, "bf16", "at model.fan.placement qk_and_v"),
        (True, "ffn", {}, {}, "bf16", "model.fan.placement is ffn"),
        (True, "ffn", {}, {"transformer_impl": "local"}, "bf16", None),
    ],
)
def test_what_the_layers_at_hand_cannot_compute(
    is_installed: bool,
    placement: str,
    parallel: Any,
    kernels: Any,
    dtype: str,
    part: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "has_transformer_engine", lambda: is_installed)
    sections = (tiny_model(fan=FANConfig(placement=placement)), ParallelConfig(**parallel), KernelsConfig(**kernels))
    found = [*layer_problems(*sections, uses_engine=has_engine(sections[2]), in_fp32=dtype == "fp32")]
    assert [part in problem for problem in found] == ([] if part is None else [True])


@pytest.mark.parametrize(
    ("has_engine", "fields", "part"),
    [
        (False, {"pipeline_model_parallel_size": 2}, "parallel.pipeline_model_parallel_size to 1"),
        (True, {"context_parallel_size": 2}, "parallel.cp_comm_type to all_gather"),
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
    assert [*backend_problems(parallel, kernels, "nccl", "cuda")] == []
    assert [*backend_problems(parallel, kernels, "gloo", "cpu")] == []


# -- FP8

MODEL = PRESETS["fanformer-1b"]
NORM_RECOMPUTED = "recompute=selective,recompute_modules=[layernorm]"


def fp8(**fields: Any) -> PrecisionConfig:
    return PrecisionConfig(**{"fp8": "hybrid", **fields})


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"dtype": "fp32"}, "precision.fp8 is hybrid with precision.dtype fp32"),
        ({"first_last_layers_bf16": True, "fp8_recipe": "delayed"}, "choose the recipe tensorwise"),
        ({"fp8_amax_history_len": 0}, "precision.fp8_amax_history_len is 0; it must be at least 1"),
        ({"fp8": None, "fp8_fan": True}, "precision.fp8_fan is true without precision.fp8"),
    ],
)
def test_a_precision_that_contradicts_itself(fields: dict[str, Any], part: str) -> None:
    (problem,) = fp8(**fields).problems()
    assert part in problem


@pytest.mark.parametrize(
    ("model", "text", "precision", "part"),
    [
        ({}, "", {}, None),
        ({}, "tp=8,sp=true", {"fp8_fan": True}, None),
        ({"ffn_hidden_size": 8200}, "", {}, "model.ffn_hidden_size is 8200, but precision.fp8 needs multiples of 16"),
        ({"ffn_hidden_size": 8208}, "", {"fp8_recipe": "mxfp8"}, "multiples of 32 on a rank (recipe mxfp8)"),
        ({"seq_length": 24}, "", {}, "a micro batch's number of tokens is 24, but"),
        ({"ffn_hidden_size": 8192 + 128}, "tp=16", {}, "model.ffn_hidden_size / tensor parallel size 16 is 520"),
        ({}, NORM_RECOMPUTED, {"fp8_recipe": "delayed"}, "cannot be recomputed with precision.fp8_recipe delayed"),
    ],
)
def test_models_and_layouts(model: dict[str, Any], text: str, precision: dict[str, Any], part: str | None) -> None:
    found = [*fp8_problems(dataclasses.replace(MODEL, **model), layout(text), fp8(**precision), 1)]
    assert len(found) == (part is not None)
    assert part is None or part in found[0]


@pytest.mark.parametrize(
    ("problems", "part"),
    [
        (
            fp8_problems(MODEL, ParallelConfig(), fp8(), 1, KernelsConfig(transformer_impl="local")),
            "layers have no FP8",
        ),
        (fp8_machine_problems(fp8(), "cpu"), "FP8 products need a GPU, and this run is on the CPU; set it to null"),
        (kernel_problems(KernelsConfig(cuda_graph_impl="local")), "cuda_graph_impl is local, but there is no GPU"),
        (backend_problems(ParallelConfig(), KernelsConfig(), "nccl", "cpu"), "is nccl, but this run is on the CPU"),
    ],
)
def test_local_layers_and_cpus_lack(problems: Iterator[str], part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (problem,) = problems
    assert part in problem


@pytest.mark.parametrize(
    ("chip", "recipe", "part"),
    [
        ((8, 0), "tensorwise", "compute capability 8.0, and FP8 needs 8.9 or higher"),
        ((8, 9), "tensorwise", None),
        ((8, 9), "blockwise", "it needs 9.0 and CUDA 12.9"),
        ((9, 0), "blockwise", None),
        ((10, 0), "mxfp8", None),
        ((12, 0), "mxfp8", "it needs 10.x"),
    ],
)
def test_chips(monkeypatch: pytest.MonkeyPatch, chip: tuple[int, int], recipe: str, part: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: chip)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    problem = device.fp8_problem(recipe)
    assert (problem is None) if part is None else part in (problem or "")
