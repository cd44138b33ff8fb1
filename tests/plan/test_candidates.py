"""Layouts as text over a configuration, and all of them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import PRESETS, FANConfig, FANformerConfig, PrecisionConfig
from megatron_fanformer.model.kernels import KernelsConfig
from megatron_fanformer.model.layout_rules import layout_problems
from megatron_fanformer.plan.candidates import all_layouts, balanced_layouts, laid_out, layout_name, recomputations
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.train.config import RunConfig, config_from_dict
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
    for each in (*layouts, config):
        assert laid_out(config, layout_name(each, config)) == each


def test_every_form_of_a_layout_is_tried() -> None:
    """Of each spelling one: nothing that needs several ranks where there is one."""
    config = run_config(parallel={"context_parallel_size": 2, "cp_comm_type": "a2a"})

    def degrees(parallel: ParallelConfig) -> tuple[int, int]:
        return parallel.tensor_model_parallel_size, parallel.context_parallel_size

    def forms(config: RunConfig) -> set[tuple[Any, ...]]:
        parallels = [micro_batches[0].parallel for micro_batches in all_layouts(config, 4)]
        return {(*degrees(each), each.cp_comm_type, each.sequence_parallel, each.fan_form) for each in parallels}

    of_fan = [(False, "column"), (True, "column"), (True, "sequence")]
    of_four = [(tp, cp) for tp in (1, 2, 4) for cp in (1, 2, 4) if tp * cp <= 4]
    expected = {
        (tp, cp, "a2a" if cp > 1 else None, *form) for tp, cp in of_four for form in of_fan[: 3 if tp > 1 else 1]
    }
    assert forms(config) == expected
    transformer = dataclasses.replace(config.model, fan=FANConfig(placement="none"))
    assert forms(dataclasses.replace(config, model=transformer)) == {each for each in expected if each[-1] == "column"}


def test_what_a_layout_does_not_name_is_the_configurations() -> None:
    config = run_config(parallel={"context_parallel_size": 2, "ddp_bucket_size": 7})
    other = laid_out(config, "tp=2,mbs=4")
    assert (other.parallel.tensor_model_parallel_size, other.parallel.context_parallel_size) == (2, 2)
    assert (other.parallel.ddp_bucket_size, other.training.micro_batch_size) == (7, 4)


def test_many_replicas_are_also_tried_in_smaller_buckets() -> None:
    """Where the default, a million elements a replica, gives fewer than four, and the configuration names no size."""
    config = dataclasses.replace(run_config(runtime={"device": "cuda"}), model=PRESETS["fanformer-1b"])

    def sizes(gpus: int, **own: int) -> set[tuple[int | None, int | None]]:
        asked = dataclasses.replace(config, parallel=ParallelConfig(**own))
        parallels = [micro_batches[0].parallel for micro_batches in all_layouts(asked, gpus)]
        plain = [each for each in parallels if each.model_parallel_size == 1]
        return {(each.data_parallel_size, each.ddp_bucket_size) for each in plain}

    eighth = round(config.model.num_parameters / 8e6) * 10**6
    assert sizes(8) == {(8, None)}
    assert sizes(1024) == {(1024, None), (1024, eighth)}
    assert sizes(1024, ddp_bucket_size=7) == {(1024, 7)}


COLUMN: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
IN_FRONT = {**COLUMN, "fan_form": "sequence"}


@pytest.mark.parametrize(
    ("layers", "placement", "fp8_recipe", "layout", "modules"),
    [
        ("local", "qkv", None, {}, [["layernorm", "fan"], ["layernorm", "fan", "mlp"]]),
        ("transformer_engine", "qkv", None, {}, [["fan"], ["fan", "mlp"]]),  # norms are fused
        ("transformer_engine", "none", None, {}, [["mlp"]]),
        ("transformer_engine", "qkv", None, IN_FRONT, [["layernorm", "fan"], ["layernorm", "fan", "mlp"]]),
        ("transformer_engine", "qkv", "tensorwise", IN_FRONT, [["layernorm", "fan"], ["layernorm", "fan", "mlp"]]),
        ("transformer_engine", "qkv", "delayed", IN_FRONT, [["fan"], ["fan", "mlp"]]),
        ("transformer_engine", "qk_and_v", None, {}, [["mlp"]]),  # on one rank recomputing FAN would free nothing
        ("transformer_engine", "qk_and_v", None, COLUMN, [["fan"], ["fan", "mlp"]]),
    ],
)
def test_what_is_fused_or_refused_is_not_recomputed(
    layers: Any, placement: str, fp8_recipe: Any, layout: dict[str, Any], modules: list[list[str]]
) -> None:
    config = run_config(model={"fan": {"placement": placement}})
    precision = PrecisionConfig(fp8="hybrid", fp8_recipe=fp8_recipe) if fp8_recipe else config.precision
    config = dataclasses.replace(config, kernels=KernelsConfig(transformer_impl=layers), precision=precision)
    parallel = ParallelConfig(**layout)
    found = recomputations(config, parallel)
    assert [each["recompute_modules"] for each in found if "recompute_modules" in each] == modules
    for each in found:
        laid = dataclasses.replace(config, parallel=dataclasses.replace(parallel, **each))
        refused = [*laid.problems_of_layout(), *laid.problems_of_steps(1)]
        assert not any("recompute" in line for line in refused)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("tp=two", "tensor_model_parallel_size"),
        ("mbs=big", "training.micro_batch_size"),
        ("tq=2", "unknown configuration key tq"),
    ],
)
def test_a_layout_that_cannot_be_read(text: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        laid_out(run_config(), text)


SEVEN = PRESETS["fanformer-7b"]  # 24 layers, and a head that counts as one


def with_layers(num_layers: int) -> FANformerConfig:
    return dataclasses.replace(SEVEN, num_layers=num_layers)


def without_a_heavy_head(num_layers: int) -> FANformerConfig:
    return dataclasses.replace(with_layers(num_layers), vocab_size=128)


@pytest.mark.parametrize(
    ("model", "stages", "expected"),
    [
        (SEVEN, 2, ["E|(t|)*24L"]),  # in one chunk a stage the even one is as good
        (SEVEN, 4, ["Et*6|t*7|t*6|t*5L"]),
        (with_layers(30), 4, ["Et*7|(t*8|)*2t*7L", "Ettt|(t*4|)*6tttL", "Et|(tt|)*14tL", "E|(t|)*30L"]),
        (with_layers(11), 4, ["Ettt|(ttt|)*2ttL", "Et|(t|)*10L"]),
        (without_a_heavy_head(5), 4, ["Et|tt|t|tL"]),  # of two chunks a stage, two would be empty
    ],
)
def test_the_head_counts_as_a_layer(model: FANformerConfig, stages: int, expected: list[str]) -> None:
    found = list(balanced_layouts(model, stages))
    assert found == expected
    for text in found:
        parallel = ParallelConfig(pipeline_model_parallel_size=stages, pipeline_model_parallel_layout=text)
        assert [*parallel.problems(), *layout_problems(model, parallel)] == []
        of_stages = parallel.layers_per_stage(model.num_layers) or []
        head = int(model.vocab_size > 128)
        units = [*of_stages[:-1], of_stages[-1] + head]
        assert max(units) == -(-(model.num_layers + head) // stages)
