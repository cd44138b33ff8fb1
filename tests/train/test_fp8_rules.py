"""FP8 where it cannot be: refused with the rule and the remedy, before anything is built."""

import dataclasses
from typing import Any

import pytest
import torch

from megatron_fanformer.model.config import PRESETS, PrecisionConfig
from megatron_fanformer.model.kernels import KernelsConfig
from megatron_fanformer.runtime import device
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.train.fp8_rules import fp8_machine_problems, fp8_problems
from tests.train.layouts import layout

MODEL = PRESETS["fanformer-1b"]


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
        (
            {},
            "recompute=selective,recompute_modules=[layernorm]",
            {"fp8_recipe": "delayed"},
            "cannot be recomputed with precision.fp8_recipe delayed",
        ),
        (
            {},
            "pp=8",
            {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 3},
            "precision.num_layers_at_end_in_bf16 is 3, but a pipeline stage has 2 layers",
        ),
    ],
)
def test_models_and_layouts(model: dict[str, Any], text: str, precision: dict[str, Any], part: str | None) -> None:
    found = [*fp8_problems(dataclasses.replace(MODEL, **model), layout(text), fp8(**precision), 1)]
    assert len(found) == (part is not None)
    assert part is None or part in found[0]


def test_local_layers_have_none() -> None:
    (problem,) = fp8_problems(MODEL, ParallelConfig(), fp8(), 1, KernelsConfig(transformer_impl="local"))
    assert "kernels.transformer_impl local, whose layers have no FP8" in problem


def test_a_cpu_has_none() -> None:
    (problem,) = fp8_machine_problems(fp8(), "cpu")
    assert "FP8 products need a GPU, and this run is on the CPU; set it to null" in problem


@pytest.mark.parametrize(
    ("chip", "recipe", "part"),
    [
        ((8, 0), "tensorwise", "compute capability 8.0, and FP8 needs 8.9 or higher"),
        ((8, 9), "tensorwise", None),
        ((8, 9), "blockwise", "it needs 9.0 and CUDA 12.9"),
        ((9, 0), "delayed", None),
        ((9, 0), "blockwise", None),
        ((9, 0), "mxfp8", "it needs 10.x"),
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
