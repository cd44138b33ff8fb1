"""Layouts as text over a configuration, and all of them."""

from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.sizing.candidates import all_layouts, laid_out, layout_name
from megatron_fanformer.training.config import RunConfig, config_from_dict
from tests.small_runs import small_run


def run_config(**sections: dict[str, Any]) -> RunConfig:
    return config_from_dict(small_run("no-tokens", Path("no-run"), **sections))


OWN_LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True, "fan_form": "sequence"},
    {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1, "context_parallel_size": 2},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    {"recompute_granularity": "selective", "recompute_modules": ["mlp"], "data_parallel_size": 4},
]


@pytest.mark.parametrize("own", OWN_LAYOUTS)
def test_the_name_of_a_layout_is_read_as_that_layout(own: dict[str, Any]) -> None:
    config = run_config(parallel=own)
    layouts = [each for micro_batches in all_layouts(config, 4) for each in micro_batches]
    assert len({layout_name(each, config) for each in layouts}) == len(layouts) > 30
    for each in layouts:
        assert laid_out(config, layout_name(each, config)) == each


def test_every_layout_is_of_all_gpus() -> None:
    config = run_config()
    parallels = [micro_batches[0].parallel for micro_batches in all_layouts(config, 12)]
    assert {each.model_parallel_size * (each.data_parallel_size or 0) for each in parallels} == {12}
    assert {each.tensor_model_parallel_size for each in parallels} == {1, 2, 3, 4, 6, 12}


def test_what_a_layout_does_not_name_is_the_configurations() -> None:
    config = run_config(parallel={"context_parallel_size": 2, "ddp_bucket_size": 7})
    other = laid_out(config, "tp=2,mbs=4")
    assert (other.parallel.tensor_model_parallel_size, other.parallel.context_parallel_size) == (2, 2)
    assert (other.parallel.ddp_bucket_size, other.training.micro_batch_size) == (7, 4)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("tp=two", "tensor_model_parallel_size"), ("mbs=big", "training.micro_batch_size"), ("tq=2", "did you mean")],
)
def test_a_layout_that_cannot_be_read(text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        laid_out(run_config(), text)
