"""What all tests share: megatron-core made ready for the CPU, and the pool of ranks."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.runtime import device, megatron_cpu
from megatron_fanformer.runtime.rank_pool import RankPool

if not any("gpu" in argument for argument in sys.argv):  # `pytest -m gpu` and `pytest tests/gpu` want to see it
    device.hide_gpus()
device.quieten_libraries()
megatron_cpu.install()

REFERENCE = Path(__file__).parent / "reference"
SAMPLES = Path(__file__).parent / "samples"


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Gloo ranks, kept alive for the whole session."""
    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="session")
def run_on_ranks(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """`run_on_ranks(world_size, function, *arguments)`: the results of all ranks."""
    return rank_pool.run
