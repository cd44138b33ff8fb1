"""What a run's optimizer is by name, its parameter groups, and what of them a resume takes over."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.optimizer_state import set_groups
from megatron_fanformer.configuration import field_texts
from megatron_fanformer.plan.gradient_buffers import EMBEDDING
from megatron_fanformer.train.config import config_from_dict
from megatron_fanformer.train.optimizers import OPTIMIZERS, OptimizerConfig
from megatron_fanformer.train.preflight import KEPT, _resume_problems
from tests.small_runs import ROOT, small_run, write_config

SAVED = {"lr": 1e-3, "max_lr": 2e-3, "min_lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "step": 7, "weight_decay": 0.1}
PRESENT = {"lr": 4e-3, "max_lr": 5e-3, "min_lr": 0.0, "betas": (0.8, 0.99), "eps": 1e-5, "weight_decay": 0.3}


def test_rates_betas_and_epsilon_are_the_present_ones_after_a_resume() -> None:
    optimizer: Any = SimpleNamespace(param_groups=[{**PRESENT, "wd_mult": 1.0}, {**PRESENT, "eps": 1e-4}])
    set_groups(optimizer, [{**SAVED, "wd_mult": 1.0}, SAVED], OPTIMIZERS["adamw"].resumed_entries)
    assert optimizer.param_groups == [{**PRESENT, "wd_mult": 1.0, "step": 7}, {**PRESENT, "eps": 1e-4, "step": 7}]


@pytest.mark.parametrize(
    ("name", "remedy"), [("Adam", "did you mean adamw?"), ("shampoo", f"name {', '.join(OPTIMIZERS)}")]
)
def test_another_name_is_refused_with_the_nearest(name: str, remedy: str) -> None:
    assert OptimizerConfig().problems() == []
    assert OptimizerConfig(name=name).problems() == [
        f"optimizer.name is '{name}', which is no optimizer here; {remedy}"
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_entry_is_complete(name: str) -> None:
    """Documented, equal to its copy in another process, and with states for every kind of weight."""
    rule = OPTIMIZERS[name]
    assert f"`{name}`" in field_texts(OptimizerConfig)["name"]
    assert rule == type(rule)() and hash(rule) == hash(type(rule)())
    for weight, dimensions in ((EMBEDDING, 2), ("linear_fc1.weight", 2), ("final_layernorm.weight", 1)):
        states = rule.states(rule.group_of(weight, dimensions))
        assert rule.state_bytes(weight, dimensions) == 4 * len(states)


@pytest.mark.parametrize("saved", [None, "adamw", "momentum"])
def test_a_run_goes_on_with_its_own(tmp_path: Path, saved: str | None) -> None:
    """Runs of earlier versions do not say which one that is: it is AdamW."""
    config = config_from_dict(small_run("tokens", tmp_path / "run"))
    values = config.as_dict()
    values["optimizer"] = {name: value for name, value in values["optimizer"].items() if name != "name"}
    if saved is not None:
        values["optimizer"]["name"] = saved
    checkpoint = tmp_path / "step-00000001"
    checkpoint.mkdir()
    write_config(checkpoint / run_folder.CONFIG, values)
    refused = [
        f"optimizer.name is adamw, but the run in {tmp_path / 'run'} has {saved}; change it back, or name another "
        "training.run_dir, which checkpoint.load starts from this one's weights"
    ]
    assert _resume_problems(checkpoint, config, "train_iters") == (refused if saved == "momentum" else [])


def test_the_page_names_the_fields_that_a_run_keeps() -> None:
    page = (ROOT / "docs" / "checkpoints-and-conversion.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"^- `model` .* must not change", page, re.MULTILINE)
    assert {name for name in re.findall(r"`([\w.]+)`", sentence) if not name.startswith("model")} == set(KEPT)


def test_matrices_of_layers_alone_are_decayed() -> None:
    rule = OPTIMIZERS["adamw"]
    assert rule.group_of("module.decoder.layers.0.mlp.linear_fc1.weight", 2) == {}
    for name, dimensions in ((f"embedding.{EMBEDDING}.weight", 2), ("input_layernorm.weight", 1), ("fan.bias", 1)):
        assert rule.group_of(name, dimensions) == {"wd_mult": 0.0}
