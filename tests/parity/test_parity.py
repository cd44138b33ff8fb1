"""The parity command's judgement: layouts without a fault pass, planted faults are caught and named."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fanformer.errors import DivergenceError
from megatron_fanformer.parity.run import ParityResult, as_json, calibrate, compare_layouts
from megatron_fanformer.parity.verb import ParityConfig, read_layouts
from megatron_fanformer.runtime.rank_pool import RankPool
from tests.parity.faults import FAULTS, Fault, faulty_trial

STEPS = 2
"""The second step's loss depends on the first one's update: the last faults show there."""


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


def compare(pool: RankPool, file: Path, *layouts: str, **options: Any) -> ParityResult:
    config = ParityConfig(file=file, layouts=layouts, **{"steps": 3, **options})
    run, named = read_layouts(config)
    return compare_layouts(calibrate(config, run, list(named.values()), pool), named, pool)


class Comparison:
    """Every layout that a fault of a table is planted in, and what they are held against: it is calibrated once.

    Args:
        faulty: `run_trial` with the fault of a name; a function that ranks import.
        others: layouts besides, in which none is planted.
        options: of the parity command.
    """

    def __init__(
        self,
        pool: RankPool,
        file: Path,
        faults: dict[str, Fault] = FAULTS,
        faulty: Callable[..., Any] = faulty_trial,
        others: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        layouts = (*sorted({fault.layout for fault in faults.values()}), *others)
        config = ParityConfig(file=file, layouts=layouts, steps=STEPS, **options)
        run, self.layouts = read_layouts(config)
        self._pool, self._faults, self._faulty = pool, faults, faulty
        self._calibration = calibrate(config, run, list(self.layouts.values()), pool)

    def of(self, *names: str) -> ParityResult:
        return compare_layouts(self._calibration, {name: self.layouts[name] for name in names}, self._pool)

    def assert_caught(self, name: str) -> None:
        """The fault is found, and is named where it first shows."""
        fault, planted = self._faults[name], functools.partial(self._faulty, name)
        named = {fault.layout: self.layouts[fault.layout]}
        result = compare_layouts(self._calibration, named, self._pool, trial_function=planted)
        (layout,) = result.layouts
        assert not layout.is_same
        assert str(layout.findings[0]).startswith(fault.first)
        with pytest.raises(DivergenceError, match=f"layout {fault.layout}: differs first in the {fault.first}"):
            result.check()


@pytest.fixture(scope="module")
def comparison(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return Comparison(rank_pool, write_config(tmp_path_factory.mktemp("parity")))


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught_and_named(comparison: Comparison, name: str) -> None:
    comparison.assert_caught(name)


def test_layouts_without_a_fault_are_the_same(comparison: Comparison) -> None:
    result = comparison.of(*comparison.layouts)
    result.check()
    assert json.loads(as_json(result, "config.yaml"))["same"]
