"""The benchmark of kernels runs, and prints what it measured."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.small_runs import ROOT

pytestmark = pytest.mark.full


def objects(*options: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(ROOT / "tools" / "bench_kernels.py"), *options, "--json"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def test_the_fan_activation() -> None:
    size = ["--device", "cpu", "--tokens", "16", "--repeats", "2", "--hidden-size", "64"]
    results = objects("fan", *size)
    ways = [(dtype, "eager", way) for dtype in ("fp32", "bf16") for way in ("forward", "backward")]
    assert [(result["dtype"], result["form"], result["direction"]) for result in results] == ways
    # 16 tokens: 48 rows read and 64 columns written; 32 columns of X_F and its 64 gradients read, 48 written.
    moved = [result["bytes_per_second"] * result["seconds"] for result in results[:2]]
    assert moved == pytest.approx([16 * 112 * 4, 16 * 144 * 4])


def test_the_loss_head() -> None:
    size = ["--device", "cpu", "--tokens", "64", "--repeats", "1", "--hidden-size", "16", "--vocab-size", "1024"]
    plain, chunked = objects("loss-head", *size, "--dtypes", "fp32")
    assert (plain["case"], chunked["case"]) == ("plain", "chunked")
    assert plain["time_ratio"] == plain["memory_ratio"] == 1 and chunked["seconds"] > 0
