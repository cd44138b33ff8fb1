"""The study of FP8 and phases: its errors by known numbers, and whole on a model of a few thousand weights."""

import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.small_runs import ROOT


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The part that computes errors; it needs torch alone."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("phase_errors")


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fan_map(study: ModuleType, hidden: torch.Tensor, weight: torch.Tensor, periodic: int) -> Any:
    """A map without a bias whose norm has weights of 1."""
    made = hidden.new_zeros(len(hidden), len(weight))
    return study.FANMap(hidden, torch.ones(hidden.shape[1]), 0.0, weight, torch.zeros(len(weight)), periodic, made)


def test_the_error_of_a_rounding(study: ModuleType) -> None:
    rounded = study.e4m3(torch.tensor([448.0, 17.0, 18.0, 19.0, -1.0625, 0.0]))
    assert rounded.tolist() == [448.0, 16.0, 18.0, 20.0, -1.0, 0.0]  # ties to even
    values = torch.logspace(-2, 2, 100_000)
    relative = (study.e4m3(values) - values) / values
    assert relative.square().mean().sqrt().item() == pytest.approx(study.E4M3_RMS, rel=0.02)


def test_numbers_that_e4m3_has_give_exact_phases(study: ModuleType) -> None:
    """Inputs of ±1, which the norm leaves alone, and weights that are powers of two."""
    layer = fan_map(study, torch.tensor([[1.0, -1.0, 1.0, 1.0]]), torch.tensor([[2.0, 0.5, 4.0, 0.0]] * 2), 1)
    assert study.exact(layer).tolist() == study.in_fp8(layer).tolist() == [[5.5, 5.5]]
    expected = study.E4M3_RMS * math.sqrt(2 * (4.0 + 0.25 + 16.0))
    assert study.expected_error(layer).tolist() == [[pytest.approx(expected)]]


def test_a_row_for_each_bin_of_phases(study: ModuleType) -> None:
    phase = torch.tensor([0.5, -1.5, 3.0, -3.0], dtype=torch.float64)
    computed = phase + torch.tensor([0.01, 0.02, 0.03, 0.04])
    rows = study.errors_by_phase(phase, computed, torch.full((4,), 0.05, dtype=torch.float64))
    assert [row["count"] for row in rows] == [1, 1, 2, 0, 0, 0]
    assert [row["phase"] for row in rows[:3]] == pytest.approx([0.01, 0.02, math.sqrt((0.03**2 + 0.04**2) / 2)])
    assert rows[0]["cos"] == pytest.approx(abs(math.cos(0.51) - math.cos(0.5)))
    assert rows[1]["sin"] == pytest.approx(abs(math.sin(1.48) - math.sin(1.5)))
    assert "phase" not in rows[3]


@pytest.mark.full  # it trains a tokenizer and starts a rank
def test_trainings_compared(run_tool: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = {"num-layers": 1, "hidden-size": 32, "ffn-hidden-size": 32, "num-attention-heads": 2, "vocab-size": 512}
    length = {"seq-length": 16, "steps": 4, "seeds": 2}
    options = [part for name, value in {**size, **length}.items() for part in (f"--{name}", str(value))]
    assert run_tool("fp8_phase", *options, "--output", str(tmp_path)) == 0
    report = json.loads((tmp_path / "fp8-phase.json").read_text())
    assert len(report) == 6 and all(len(each) == 2 and len(each[0]["losses"]) == 4 for each in report.values())
    fan, all_fp8 = report["FANformer bf16"][0], report["FANformer FP8, FAN map FP8"][0]
    assert list(fan["phases"]) == ["0", "4"] and report["Transformer bf16"][0]["phases"] == {}
    # One layer, the same initial weights and samples: the FP8 map of the formula is the one that the Engine computes.
    for formula, engine in zip(fan["phases"]["0"]["fp8"], all_fp8["phases"]["0"]["fp8"], strict=True):
        assert engine == pytest.approx(formula, rel=1e-3)
    message = capsys.readouterr().out
    assert all(f"| {name} |" in message for name in report)
