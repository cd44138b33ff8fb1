"""Costs: formula and count, and the paper's own difference of memory."""

from pathlib import Path

import pytest

from megatron_fanformer.experiments.probes import cost
from megatron_fanformer.experiments.probes.settings import CostSettings
from megatron_fanformer.model.config import PRESETS


def test_formulas_equal_what_is_counted_and_a_wrong_one_would_show(monkeypatch):
    settings = CostSettings(presets=("fanformer-300m",), sequence_length=256, inference_length=256)
    measured = cost.measure(settings, Path(), lambda _: None)
    assert measured.findings[0].ours == 0.0
    right = cost.forward_flops_per_token
    monkeypatch.setattr(cost, "forward_flops_per_token", lambda *asked: right(*asked) - 1000)
    assert cost.measure(settings, Path(), lambda _: None).findings[0].ours > 0
    names = [row[0] for row in measured.tables[0].rows]
    assert names == ["fanformer-300m-transformer", "fanformer-300m", "fanformer-300m-same-params"]


def test_weights_differ_by_what_the_paper_measured():
    """96.17 MB of 4,738.86 there; by formula 96.05 MiB, in half precision."""
    sizes = [PRESETS[name].num_parameters for name in ("fanformer-1b", "fanformer-1b-transformer")]
    low, high = cost.PAPER_MEMORY
    assert cost.HALF_BYTES * (sizes[0] - sizes[1]) / cost.MIB == pytest.approx(high - low, abs=0.2)
