"""Records the order in which files reach the disk and get their names: what a power failure leaves depends on it."""

import os
from pathlib import Path
from typing import Any

import pytest


def recorded_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Fill the list from here on with ("fsync", NAME) and ("rename", NEW NAME), as this process takes these steps."""
    steps: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        steps.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def recorded_replace(old: Any, new: Any) -> None:
        steps.append(("rename", Path(new).name))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    return steps
