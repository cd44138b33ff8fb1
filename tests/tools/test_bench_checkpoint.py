"""The checkpoints' benchmark runs, and says what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_checkpoint.py"


@pytest.mark.full
def test_an_object_an_operation() -> None:
    size = ["--hidden-size", "64", "--num-layers", "2", "--vocab-size", "512", "--repeats", "1"]
    done = subprocess.run([sys.executable, str(TOOL), *size, "--json"], check=True, capture_output=True, text=True)
    saving, loading = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert (saving["operation"], loading["operation"]) == ("save", "load")
    assert saving["bytes"] == loading["bytes"] > 12 * 64 * 512
    assert min(saving["checked"], saving["unchecked"], loading["checked"], loading["unchecked"]) > 0
