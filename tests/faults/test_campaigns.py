"""The campaigns of `kills.py` and `mirror_kills.py`, shorter than they are run by hand."""

import subprocess
import sys

import pytest

from tests.faults.mirror_kills import needs_server
from tests.small_runs import ROOT


@pytest.mark.full
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize(
    ("command", "campaigns"),
    [
        ("kills --kills 60", 6),
        ("mirror_kills --kills 10", 2),
        pytest.param("mirror_kills --kills 10 --s3", 2, marks=needs_server),
    ],
)
def test_killed_runs_end_as_if_nobody_had_touched_them(command: str, campaigns: int) -> None:
    module, *options = command.split()
    asked = [sys.executable, "-m", f"tests.faults.{module}", *options]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every one ended the same") == campaigns
