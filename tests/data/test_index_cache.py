import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_fanformer.data import index_cache
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.index_cache import indices_in
from megatron_fanformer.durable_files import take_lock
from tests.data.token_making import build, drawn, write_pair

SAMPLES = 60
INDICES = ("document_index", "sample_index", "shuffle_index")


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return DataConfig(train_data=[write_pair(tmp_path / "samples", [[200 + number] for number in range(30)])])


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / ".index_cache"


def samples_of(config: DataConfig) -> torch.Tensor:
    return drawn(build(config, SAMPLES).train, SAMPLES)


def stamps(cache: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in cache.glob("*/*")}


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def test_whole_indices_are_used_again(config: DataConfig, cache: Path) -> None:
    first, before = samples_of(config), stamps(cache)
    assert torch.equal(samples_of(config), first)
    assert stamps(cache) == before


@pytest.mark.parametrize("spoil", [cut_off, Path.unlink])
@pytest.mark.parametrize("index", INDICES)
def test_torn_indices_are_built_again(
    config: DataConfig, cache: Path, spoil: Callable[[Path], Any], index: str
) -> None:
    first = samples_of(config)
    (path,) = cache.glob(f"*/*{index}.npy")
    spoil(path)
    assert torch.equal(samples_of(config), first)
    assert np.load(path, allow_pickle=False).size


def test_indices_that_a_killed_job_left_are_built_again(config: DataConfig, cache: Path) -> None:
    """It had not written down yet that they are whole."""
    first = samples_of(config)
    for path in cache.glob("*/complete.json"):
        path.unlink()
    for path in cache.glob("*/*shuffle_index.npy"):
        cut_off(path)
    assert torch.equal(samples_of(config), first)


def test_of_two_jobs_one_waits_until_the_other_has_built(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    other = take_lock(cache / ".lock", wait=False)
    assert other is not None
    monkeypatch.setattr(index_cache.logger, "info", lambda *_: os.close(other))  # it has, once this one waits
    with indices_in(cache, "samples"):
        assert take_lock(cache / ".lock", wait=False) is None
