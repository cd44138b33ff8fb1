"""Benchmarks run, and say what they measured: an object for each case."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.small_runs import ROOT

pytestmark = pytest.mark.full
HEAD = {"tokens": 64, "hidden_size": 16, "vocab_size": 1024, "threads": 1, "repeats": 1}


def printed(tool: str, size: dict[str, int], *options: str) -> list[str]:
    flags = [part for name, value in size.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), *flags, *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def objects(tool: str, size: dict[str, int], *options: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in printed(tool, size, *options, "--json") if line.startswith("{")]


def test_the_loss_head() -> None:
    plain, default, eights = objects("bench_loss_head", HEAD, "--chunk-tokens", "8")
    assert [case["case"] for case in (plain, default, eights)] == ["plain", "chunked", "chunked 8"]
    assert [case["chunk_tokens"] for case in (plain, default, eights)] == [64, 51_200, 8]
    assert plain["time_ratio"] == plain["memory_ratio"] == 1
    for case in (plain, default, eights):
        assert case["seconds"] > 0
        assert case["logits_bytes"] == 4 * 64 * 1024
        assert {name: case[name] for name in HEAD} == HEAD
    assert [line.split()[0] for line in printed("bench_loss_head", HEAD)[1:]] == ["head", "plain", "chunked"]


def test_starts() -> None:
    """On two tensor parallel ranks: the first one reads the step's one sample."""
    size = {"files": 2, "file_bytes": 200_000, "seq_length": 64, "ranks": 2, "tensor_ranks": 2}
    results = objects("bench_start", size)
    cases = ("small file", "first start", "later start")
    assert [(result["case"], result["rank"]) for result in results] == [
        (case, rank) for case in cases for rank in (0, 1)
    ]
    assert [result["reads"] for result in results] == [1, 0] * 3
    for result in results:
        assert result["processor_seconds"] > 0 and result["private_mib"] > 0 and result["order_bytes"] == 0
