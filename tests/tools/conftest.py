"""Tools, run in this process."""

import runpy
import sys
from collections.abc import Callable

import pytest

from tests.small_runs import ROOT


@pytest.fixture
def run_tool(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`run_tool(name, *arguments)`: the exit code of a tool's `main`."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))

    def run(name: str, *arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        return runpy.run_path(str(ROOT / "tools" / f"{name}.py"))["main"]()

    return run
