"""The benchmark of attention within documents runs, and says what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_document_attention.py"
ROW = {"tokens": 128, "heads": 2, "head_size": 8, "threads": 1, "repeats": 1}


@pytest.mark.full
def test_an_object_a_length() -> None:
    row = [part for name, value in ROW.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    done = subprocess.run([sys.executable, str(TOOL), *row, "--json"], check=True, capture_output=True, text=True)
    whole, halves, quarters = map(json.loads, done.stdout.splitlines())
    assert [result["documents"] for result in (whole, halves, quarters)] == [1, 2, 4]
    assert halves["squares"] == 63**2 + 65**2
    assert quarters["squares"] == 2 * (31**2 + 33**2)
    assert whole["squares_ratio"] == whole["time_ratio"] == whole["processor_ratio"] == 1
    for result in (whole, halves, quarters):
        assert result["seconds"] > 0
        assert result["squares_ratio"] == result["squares"] / 128**2
        assert {name: result[name] for name in ROW} == ROW
