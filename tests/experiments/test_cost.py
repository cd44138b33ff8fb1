"""Costs: memory as counted, and the paper's own difference of memory."""

from pathlib import Path

import pytest

from megatron_fanformer.experiments import cost
from megatron_fanformer.experiments.probe import CostSettings
from megatron_fanformer.model.config import PRESETS, as_transformer, with_same_parameters
from tests.tiny import tiny_model


def test_weights_count_once_in_the_peak(monkeypatch):
    sizes = dict(
        zip(cost.TWINS, (as_transformer(tiny_model()), tiny_model(), with_same_parameters(tiny_model())), strict=True)
    )
    monkeypatch.setattr(cost, "PRESETS", {f"tiny{twin}": config for twin, config in sizes.items()})
    settings = CostSettings(presets=("tiny",), sequence_length=64, inference_length=1)
    rows = cost.measure(settings, Path(), lambda _: None).tables[0].rows
    assert [row[0] for row in rows] == ["tiny-transformer", "tiny", "tiny-same-params"]
    none, fan, _ = (row[-2:] for row in rows)
    assert fan[1] - none[1] == pytest.approx(fan[0] - none[0], rel=0.2)


def test_weights_differ_by_what_the_paper_measured():
    """96.17 MB of 4,738.86 there; by formula 96.05 MiB, in half precision."""
    sizes = [PRESETS[name].num_parameters for name in ("fanformer-1b", "fanformer-1b-transformer")]
    low, high = cost.PAPER_MEMORY
    assert cost.HALF_BYTES * (sizes[0] - sizes[1]) / cost.MIB == pytest.approx(high - low, abs=0.2)
