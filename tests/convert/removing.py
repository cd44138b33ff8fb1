"""Removes a checkpoint while it is read, as a run that goes on removes its oldest."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from megatron_fanformer.checkpoint.full_tensors import StoredTensors


def remove_after(reads: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove it after so many of its tensors are read."""
    read, left = StoredTensors.read, [None] * reads

    def removing(stored: StoredTensors, *arguments: Any) -> Tensor:
        if left:
            left.pop()
        else:
            shutil.rmtree(checkpoint, ignore_errors=True)
        return read(stored, *arguments)

    monkeypatch.setattr(StoredTensors, "read", removing)
