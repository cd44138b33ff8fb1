"""The benchmark of collectives runs, and says what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_collectives.py"


@pytest.mark.full
def test_an_object_for_each_collective_and_size() -> None:
    asked = [sys.executable, str(TOOL), "--repeats", "1", "--json"]
    done = subprocess.run(asked, check=True, capture_output=True, text=True)
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert {result["collective"] for result in results} == {"all-reduce", "reduce-scatter", "all-gather"}
    assert {result["bytes"] for result in results} == {2**11, 2**19, 2**22, 2**25, 2**27}
    assert all(result["gloo_seconds"] > 0 and result["memory_seconds"] > 0 for result in results)
