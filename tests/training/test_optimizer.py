"""What of a loaded optimizer's parameter groups is the run's own."""

from types import SimpleNamespace
from typing import Any

from megatron_fanformer.training.optimizer import keep_hyperparameters

SAVED = {"lr": 1e-3, "max_lr": 2e-3, "min_lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "step": 7, "weight_decay": 0.1}
PRESENT = {"lr": 4e-3, "max_lr": 5e-3, "min_lr": 0.0, "betas": (0.8, 0.99), "eps": 1e-5, "step": 0, "weight_decay": 0.3}
OWN = ("lr", "max_lr", "min_lr", "betas", "eps")


def test_rates_betas_and_epsilon_are_the_present_ones_after_a_resume() -> None:
    """Of each kind of weights; steps and decay are the checkpoint's, as is a group that this stage does not have."""
    optimizer: Any = SimpleNamespace(
        param_groups=[{**PRESENT, "wd_mult": 1.0}, {**PRESENT, "eps": 1e-4, "wd_mult": 0.0}]
    )
    loaded = [{**SAVED, "wd_mult": kind} for kind in (0.0, 1.0, 2.0)]
    keep_hyperparameters(optimizer, loaded)
    present = {name: PRESENT[name] for name in OWN}
    assert loaded == [
        {**SAVED, **present, "eps": 1e-4, "wd_mult": 0.0},
        {**SAVED, **present, "wd_mult": 1.0},
        {**SAVED, "wd_mult": 2.0},
    ]
