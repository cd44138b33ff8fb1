"""A run of many steps holds no more of the machine in the end than early on; `long_run.py` takes twenty thousand."""

import subprocess
import sys

import pytest

from tests.small_runs import ROOT


@pytest.mark.full
def test_nothing_grows_over_many_steps() -> None:
    command = [sys.executable, "-m", "tests.faults.long_run", "--steps", "2000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
