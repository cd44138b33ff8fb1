"""The loss head's benchmark runs, and says what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_loss_head.py"
SIZE = {"tokens": 64, "hidden_size": 16, "vocab_size": 1024, "threads": 1, "repeats": 1}


def bench(*options: str) -> str:
    size = [part for name, value in SIZE.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, str(TOOL), *size, *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.full
def test_an_object_a_case() -> None:
    plain, default, eights = map(json.loads, bench("--chunk-tokens", "8", "--json").splitlines())
    assert [case["case"] for case in (plain, default, eights)] == ["plain", "chunked", "chunked 8"]
    assert [case["chunk_tokens"] for case in (plain, default, eights)] == [64, 51_200, 8]
    assert plain["time_ratio"] == plain["memory_ratio"] == 1
    for case in (plain, default, eights):
        assert case["seconds"] > 0
        assert case["logits_bytes"] == 4 * 64 * 1024
        assert {name: case[name] for name in SIZE} == SIZE


@pytest.mark.full
def test_a_table() -> None:
    assert [line.split()[0] for line in bench().splitlines()[1:]] == ["head", "plain", "chunked"]
