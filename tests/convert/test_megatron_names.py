"""Megatron-LM's names of a run's settings, and the answers to unknown keys."""

import argparse
import contextlib
import importlib.util
import io

import pytest

from megatron_fanformer.configuration import describe_fields
from megatron_fanformer.convert.megatron_names import COUNTERPARTS, plain
from megatron_fanformer.errors import InputError
from megatron_fanformer.train.config import RunConfig, load_config
from tests.small_runs import ROOT


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("training.data_cache_path", "did you mean data.cache_path?"),
        ("training.lr_warmup_samples", "did you mean schedule.lr_warmup_iters (in steps)?"),
        ("optimizer.weight_decy", "did you mean optimizer.weight_decay?"),  # near
        ("training.weight_decay", "did you mean optimizer.weight_decay?"),  # in another section
        ("model.p_ratio", "did you mean model.fan.p_ratio?"),
        ("checkpoint.zip", "the keys here are "),  # near nothing
    ],
)
def test_an_unknown_key_is_answered(name: str, answer: str) -> None:
    with pytest.raises(InputError) as refused:
        load_config(ROOT / "examples" / "tiny-cpu.yaml", [f"--{name}", "1"])
    assert str(refused.value).startswith(f"unknown configuration key {name}; {answer}")


def test_every_counterpart_is_a_field_of_another_name() -> None:
    fields = {field.name for field in describe_fields(RunConfig)}
    assert {row.field for row in COUNTERPARTS.values()} <= fields
    assert {name for name, row in COUNTERPARTS.items() if plain(row.field) == name} <= {"load"}


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("megatron.training") is None, reason="comes with megatron-core 0.19")
def test_the_arguments_are_megatrons_own() -> None:
    from megatron.training.arguments import add_megatron_arguments

    with contextlib.redirect_stdout(io.StringIO()):
        parser = add_megatron_arguments(argparse.ArgumentParser())
    assert COUNTERPARTS.keys() - map(plain, parser._option_string_actions) == set()
