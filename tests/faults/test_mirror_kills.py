"""Runs that are killed while they copy checkpoints to another store; `mirror_kills.py` does it as often as asked."""

import subprocess
import sys

import pytest

from tests.faults.mirror_kills import needs_server
from tests.small_runs import ROOT


@pytest.mark.full
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("store", ["file", pytest.param("s3", marks=needs_server)])
def test_killed_runs_whose_folders_are_lost_end_as_if_nobody_had_touched_them(store: str) -> None:
    command = [sys.executable, "-m", "tests.faults.mirror_kills", "--kills", "10", *(["--s3"] if store == "s3" else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("every one ended the same") == 2
