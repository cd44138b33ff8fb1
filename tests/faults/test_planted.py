"""The lists of planted faults: each can still be planted where it stands, and what is to notice it is there."""

import re

import pytest

from tests.faults.planted import REPOSITORY, faults_of, rooms


@pytest.mark.parametrize("room", rooms())
def test_every_fault_can_be_planted(room: str) -> None:
    for fault in faults_of(room):
        fault.planted(REPOSITORY)
        assert fault.tests, f"{fault.name} names no tests"
        for test in fault.tests:
            file, *names = test.split("::")
            text = (REPOSITORY / file).read_text()
            assert all(re.search(rf"^ *(def|class) {name}\b", text, re.MULTILINE) for name in names), test
