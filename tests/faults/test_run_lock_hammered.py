"""The run's lock under processes that are killed at random while they take it, hold it and let it go."""

import json
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_SECONDS
from tests.small_runs import start_program

SECONDS = [1, pytest.param(60, marks=pytest.mark.full)]


@pytest.mark.parametrize("seconds", SECONDS)
def test_no_two_processes_ever_hold_it_and_no_killed_one_keeps_it(tmp_path: Path, seconds: int) -> None:
    process = start_program(sys.executable, "-m", "tests.faults.lock_hammer", str(tmp_path), str(seconds))
    output, errors = process.communicate(timeout=seconds + PATIENCE_SECONDS)
    assert process.returncode == 0, errors
    counts = json.loads(output)
    assert (counts["violated"], counts["ended by an error"]) == (0, 0)
    assert counts["taken"] > 0 < counts["killed"]
