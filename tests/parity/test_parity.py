"""The parity command's judgement: layouts without a fault pass, planted faults are caught and named."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fanformer.errors import DivergenceError
from megatron_fanformer.parity.report import as_values
from megatron_fanformer.parity.run import (
    ParityConfig,
    ParityResult,
    calibrate,
    compare_layouts,
    read_layouts,
    run_parity,
)
from megatron_fanformer.runtime.rank_pool import RankPool
from tests.parity.faults import FAULTS, faulty_trial


def write_config(folder: Path, **sections: dict[str, Any]) -> Path:
    """A configuration of the 1B, clipping at a norm that its gradients exceed; `sections` replace whole ones."""
    values = {
        "model": {"preset": "fanformer-1b"},
        "kernels": {"transformer_impl": "local"},
        "runtime": {"device": "cpu"},
        "data": {"train_data": ["no-such-tokens"]},
        "optimizer": {"lr": 1e-3, "clip_grad": 0.1},
        "training": {"run_dir": str(folder), "train_iters": 10, "global_batch_size": 32, "micro_batch_size": 1},
        **sections,
    }
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def compare(pool: RankPool, file: Path, *layouts: str, **options: Any) -> ParityResult:
    return run_parity(ParityConfig(file=file, layouts=layouts, **{"steps": 3, **options}), pool=pool)


class Comparison:
    """Every layout that a fault is planted in, and what they are held against: it is calibrated once."""

    def __init__(self, pool: RankPool, file: Path, dtype: str = "fp32") -> None:
        config = ParityConfig(
            file=file, layouts=tuple(sorted({f.layout for f in FAULTS.values()})), steps=3, dtype=dtype
        )
        run, self.layouts = read_layouts(config)
        self._pool = pool
        self._calibration = calibrate(config, run, list(self.layouts.values()), pool)

    def of(self, *names: str) -> ParityResult:
        return compare_layouts(self._calibration, {name: self.layouts[name] for name in names}, self._pool)

    def with_fault(self, name: str) -> ParityResult:
        layout, planted = FAULTS[name].layout, functools.partial(faulty_trial, name)
        named = {layout: self.layouts[layout]}
        return compare_layouts(self._calibration, named, self._pool, trial_function=planted)


@pytest.fixture(scope="module")
def comparison(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return Comparison(rank_pool, write_config(tmp_path_factory.mktemp("parity")))


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught_and_named(comparison: Comparison, name: str) -> None:
    fault = FAULTS[name]
    result = comparison.with_fault(name)
    (layout,) = result.layouts
    assert not layout.is_same
    assert str(layout.findings[0]).startswith(fault.first)
    with pytest.raises(DivergenceError, match=f"layout {fault.layout}: differs first in the {fault.first}"):
        result.check()


def test_bf16_is_told_from_a_fault(rank_pool: RankPool, config_file: Path) -> None:
    name = "p and g shards swapped on one rank"
    comparison = Comparison(rank_pool, config_file, "bf16")
    comparison.of("tp=2", "dp=2").check()
    (layout,) = comparison.with_fault(name).layouts
    assert str(layout.findings[0]).startswith(FAULTS[name].first)


def test_layouts_without_a_fault_are_the_same(comparison: Comparison) -> None:
    result = comparison.of(*comparison.layouts)
    result.check()
    values = as_values(result, "config.yaml")
    assert values["same"]
    assert json.loads(json.dumps(values)) == values
