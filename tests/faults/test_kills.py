"""Runs that are killed at random moments end as if nobody had touched them; `kills.py` does it a thousand times."""

import subprocess
import sys

import pytest

from tests.small_runs import ROOT


@pytest.mark.full
def test_killed_runs_end_as_if_nobody_had_touched_them() -> None:
    command = [sys.executable, "-m", "tests.faults.kills", "--kills", "60"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("every one ended the same") == 6
