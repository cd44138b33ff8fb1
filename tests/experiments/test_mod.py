"""The fit of t mod 5: errors by formula, controls of equal size, and (`full`) the effect."""

from pathlib import Path

import pytest
import torch

from megatron_fanformer.experiments import mod
from megatron_fanformer.experiments.probe import ModSettings

VARIANCE = 25 / 12  # of t mod 5
TINY = ModSettings(seeds=2, control_size=8, control_steps=3, model_layers=1, model_size=16, model_steps=2, batch_size=8)


def test_errors_are_those_of_known_fits():
    assert mod.error(mod.target, 0.0, 100.0) == 0.0
    guess = mod.error(lambda t: torch.full_like(t, 2.5), 100.0, 200.0)
    assert guess == pytest.approx(VARIANCE, rel=1e-3)
    inside_alone = lambda t: torch.where(t.abs() <= 100.0, mod.target(t), -1.0)  # noqa: E731
    assert mod.error(inside_alone, 0.0, 100.0) == 0.0
    assert mod.error(inside_alone, 100.0, 200.0) == pytest.approx(VARIANCE + 3.5**2, rel=1e-3)


def test_all_models_of_a_seed_see_the_same_and_every_comparison_is_told(monkeypatch):
    seen = {}

    def noted(t):
        seen.setdefault(len(t), []).append(t.sum().item())
        return t.remainder(5.0)

    monkeypatch.setattr(mod, "target", noted)
    message = []
    measured = mod.measure(TINY, Path(), message.append)
    batches = seen[TINY.batch_size]
    controls, models = batches[:6], batches[6:12]
    assert controls[:3] == controls[3:] and models[:2] == models[2:4] == models[4:]
    assert len(message) == 2 * 5 and len(measured.tables[0].rows) == 10
    assert len(measured.findings) == 6 and all(finding.interval for finding in measured.findings)
    assert measured.pictures["fit.png"].startswith(b"\x89PNG")


def test_a_planted_tie_is_no_win_and_a_planted_difference_is_one():
    names = {name for pair in mod.PAIRS for name in pair}
    errors = {name: {"inside": [1.0, 2.0, 3.0], "outside": [2.0, 2.1, 1.9]} for name in names}
    errors[mod.FAN]["outside"] = [0.9, 1.0, 1.1]
    errors[mod.MLP]["inside"] = [1.1, 1.9, 3.2]  # a tie with noise
    shows = {finding.name: finding.shows for finding in mod._findings(errors)}
    assert shows.pop("error outside the range, FAN network over MLP") is True
    assert not any(shows.values())
