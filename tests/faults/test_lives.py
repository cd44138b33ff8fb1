"""Every fault of `lives.py`: the run, with all its ranks, ends in time and says why, or goes on."""

from pathlib import Path

import pytest

from tests.faults.lives import FAULTS, inflict

ALWAYS = ("killed group",)  # the judgement of a heartbeat is in tests/runtime/test_heartbeat.py


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.full) for name in FAULTS]
)
def test_a_run_ends_in_time_and_says_why_or_goes_on(name: str, tmp_path: Path) -> None:
    inflict(name, tmp_path, patience=5)
