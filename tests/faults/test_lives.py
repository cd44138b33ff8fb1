"""Every fault of `lives.py`: the run, with all its ranks, ends in time and says why, or goes on."""

from pathlib import Path

import pytest

from tests.faults.lives import FAULTS, inflict


@pytest.mark.full  # in every run: tests/runtime/test_roll_call.py, tests/test_processes.py
@pytest.mark.parametrize("name", FAULTS)
def test_a_run_ends_in_time_and_says_why_or_goes_on(name: str, tmp_path: Path) -> None:
    inflict(name, tmp_path, patience=5)
