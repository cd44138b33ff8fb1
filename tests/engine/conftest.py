"""Ranks on which Transformer Engine's layers compute, without a GPU (see tests/engine_on_cpu)."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_fanformer.runtime.rank_pool import RankPool
from tests.engine_on_cpu import installing


@pytest.fixture(scope="session")
def engine_pool() -> Iterator[RankPool]:
    """Ranks as on GPUs: the Engine's layers, gradients fused, over gloo."""
    with RankPool("cuda", backend="gloo", prepare=installing.install) as pool:
        yield pool


@pytest.fixture(scope="session")
def run_on_engine_ranks(engine_pool: RankPool) -> Callable[..., list[Any]]:
    """`run_on_engine_ranks(world_size, function, *arguments)`: the results of all ranks."""
    return engine_pool.run
