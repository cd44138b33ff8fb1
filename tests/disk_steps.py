"""Disks for tests: one that records in which order files reach it, and one that is full."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def small_files(most_bytes: int) -> Iterator[None]:
    """A system that takes no larger file; what it says is EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
