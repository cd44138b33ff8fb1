"""The parity command's judgement: layouts without a fault pass, planted faults are caught and named."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fanformer.errors import DivergenceError
from megatron_fanformer.parity.report import as_values
from megatron_fanformer.parity.run import ParityConfig, ParityResult, run_parity
from megatron_fanformer.parity.trial import run_trial
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


def compare(pool: RankPool, file: Path, *layouts: str, fault: str | None = None, **options: Any) -> ParityResult:
    trial = functools.partial(faulty_trial, fault) if fault else run_trial
    config = ParityConfig(file=file, layouts=layouts, **{"steps": 3, **options})
    return run_parity(config, pool=pool, trial_function=trial)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught_and_named(rank_pool: RankPool, config_file: Path, name: str) -> None:
    fault = FAULTS[name]
    result = compare(rank_pool, config_file, fault.layout, fault=name)
    (layout,) = result.layouts
    assert not layout.is_same
    assert str(layout.findings[0]).startswith(fault.first)
    with pytest.raises(DivergenceError, match=f"layout {fault.layout}: differs first in the {fault.first}"):
        result.check()


def test_bf16_is_told_from_a_fault(rank_pool: RankPool, config_file: Path) -> None:
    name = "p and g shards swapped on one rank"
    compare(rank_pool, config_file, "tp=2", "dp=2", dtype="bf16").check()
    (layout,) = compare(rank_pool, config_file, FAULTS[name].layout, fault=name, dtype="bf16").layouts
    assert str(layout.findings[0]).startswith(FAULTS[name].first)


def test_layouts_without_a_fault_are_the_same(rank_pool: RankPool, config_file: Path) -> None:
    layouts = {fault.layout for fault in FAULTS.values()}
    result = compare(rank_pool, config_file, *sorted(layouts))
    result.check()
    values = as_values(result, "config.yaml")
    assert values["same"]
    assert json.loads(json.dumps(values)) == values
