"""Blends of many sources are drawn as megatron-core draws them."""

from pathlib import Path

import numpy as np
import pytest

from megatron_fanformer.ops import blend_order, libraries
from megatron_fanformer.ops.blend_order import fill_blend_order

KINDS = ["uniform", "equal", "nearly equal", "long-tailed", "of files"]


def weights_of(kind: str, sources: int) -> np.ndarray:
    draw = np.random.default_rng(sources)
    weights: np.ndarray = {
        "uniform": draw.random(sources) + 1e-9,
        "equal": np.ones(sources),
        "nearly equal": 1 + 1e-9 * draw.random(sources),
        "long-tailed": draw.pareto(1.1, sources) + 1e-6,
        "of files": np.floor(draw.lognormal(12, 1, sources)),
    }[kind]
    return weights / weights.sum()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    arrays = np.zeros(1, np.int16), np.zeros(1, np.int64)
    if not fill_blend_order([1.0], *arrays, cache=folder):
        pytest.skip("this machine has no C++ compiler, or is not an x86_64")
    return folder


@pytest.mark.parametrize("sources", [1, 2, 7, 300, 2000])
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_megatron_cores(cache: Path, kind: str, sources: int) -> None:
    from megatron.core.datasets import helpers

    samples = 30_000 if sources < 2000 else 12_000  # six rounds of all
    weights = weights_of(kind, sources)
    (expected, found) = ((np.zeros(samples, np.int16), np.zeros(samples, np.int64)) for _ in range(2))
    helpers.build_blending_indices(*expected, weights, sources, samples, False)
    assert fill_blend_order(weights.tolist(), *found, cache=cache)
    for own, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own, right)


def test_without_a_compiler_megatron_core_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = np.zeros(1, np.int16), np.zeros(1, np.int64)
    monkeypatch.setattr(blend_order, "OPTIONS", ("--no-such-option",))
    assert not fill_blend_order([1.0], *arrays, cache=tmp_path)
    monkeypatch.setattr(libraries, "COMPILERS", ())
    assert not fill_blend_order([1.0], *arrays, cache=tmp_path)
