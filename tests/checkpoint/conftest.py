"""Stores that fail, for the tests of copies and of fetching."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from megatron_fanformer import stores
from tests.checkpoint.stores import FailingFiles


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[str]:
    """The URL of a store that fails as `FailingFiles` is told."""
    fsspec.register_implementation("failing", FailingFiles, clobber=True)
    FailingFiles.target = FailingFiles.count = 0
    yield f"failing://{tmp_path}/there"
    FailingFiles.target = 0


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that would have been waited before further attempts."""
    waited: list[float] = []
    monkeypatch.setattr(stores.time, "sleep", waited.append)
    return waited
