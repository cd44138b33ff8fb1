"""Layouts as text over a configuration; the search against looking at every layout; rejections against `train`."""

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import PRESETS, FANConfig, KernelsConfig, PrecisionConfig
from megatron_fanformer.plan.estimate import Estimate, estimate, problems, resolve_for_machine
from megatron_fanformer.plan.machines import DRIVERS_SHARE, Machine, load_machine
from megatron_fanformer.plan.search import (
    MOST_SHOWN,
    NUMBERS,
    all_layouts,
    apply_layout,
    judge,
    layout_name,
    recomputations,
    search,
)
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.train.config import RunConfig
from megatron_fanformer.train.preflight import find_start
from tests.plan.runs import small_config
from tests.small_runs import write_tokens

OWN_LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor_model_parallel_size": 2, "sequence_parallel": True, "fan_form": "sequence"},
    {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1, "context_parallel_size": 2},
    {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    {"recompute_granularity": "selective", "recompute_modules": ["mlp"], "data_parallel_size": 4},
]


def every_layout(config: RunConfig, gpus: int) -> list[RunConfig]:
    return [each for micro_batches in all_layouts(config, gpus) for each in micro_batches]


@pytest.mark.parametrize("own", OWN_LAYOUTS)
def test_the_name_of_a_layout_is_read_as_that_layout(own: dict[str, Any]) -> None:
    config = small_config(parallel=own)
    layouts = [each for layout in every_layout(config, 4) for each in recomputations(layout)]
    assert len({layout_name(each, config) for each in layouts}) == len(layouts) > 30
    for each in (*layouts, config):
        assert apply_layout(config, layout_name(each, config)) == each


def test_every_form_of_a_layout_is_tried() -> None:
    """Of each spelling one: nothing that needs several ranks where there is one."""
    config = small_config(parallel={"context_parallel_size": 2, "cp_comm_type": "a2a"})

    def forms(config: RunConfig) -> set[tuple[Any, ...]]:
        names = ("tensor_model_parallel_size", "context_parallel_size", "cp_comm_type", "sequence_parallel", "fan_form")
        return {tuple(getattr(each.parallel, name) for name in names) for each in every_layout(config, 4)}

    of_fan = [(False, "column"), (True, "column"), (True, "sequence")]
    of_four = [(tp, cp) for tp in (1, 2, 4) for cp in (1, 2, 4) if tp * cp <= 4]
    expected = {
        (tp, cp, "a2a" if cp > 1 else None, *form) for tp, cp in of_four for form in of_fan[: 3 if tp > 1 else 1]
    }
    assert forms(config) == expected
    transformer = dataclasses.replace(config.model, fan=FANConfig(placement="none"))
    assert forms(dataclasses.replace(config, model=transformer)) == {each for each in expected if each[-1] == "column"}


def test_many_replicas_have_smaller_buckets() -> None:
    """Where the default, a million elements a replica, gives fewer than four, and the configuration names no size."""
    config = dataclasses.replace(small_config(runtime={"device": "cuda"}), model=PRESETS["fanformer-1b"])

    def sizes(gpus: int, **own: int) -> set[tuple[int | None, int | None]]:
        asked = dataclasses.replace(config, parallel=ParallelConfig(**own))
        parallels = [each.parallel for each in every_layout(asked, gpus)]
        plain = [each for each in parallels if each.model_parallel_size == 1]
        return {(each.data_parallel_size, each.ddp_bucket_size) for each in plain}

    assert sizes(8) == {(8, None)}
    assert sizes(1024) == {(1024, round(config.model.num_parameters / 8e6) * 10**6)}
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
    config = small_config(model={"fan": {"placement": placement}})
    precision = PrecisionConfig(fp8="hybrid", fp8_recipe=fp8_recipe) if fp8_recipe else config.precision
    config = dataclasses.replace(config, kernels=KernelsConfig(transformer_impl=layers), precision=precision)
    config = dataclasses.replace(config, parallel=ParallelConfig(**layout))
    found = recomputations(config)
    selective = [each.parallel for each in found if each.parallel.recompute_granularity == "selective"]
    assert [each.recompute_modules for each in selective] == modules
    for each in found:
        refused = [*each.problems_of_layout(), *each.problems_of_steps(1)]
        assert not any("recompute" in line for line in refused)


# -- the fastest

GPUS = 8


@pytest.fixture(scope="module")
def h100() -> Machine:
    return load_machine("h100")


@pytest.fixture(scope="module")
def config(h100: Machine, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A small model of 6 layers, whose FAN map does not divide over four ranks; 8 samples a step."""
    tokens = write_tokens(tmp_path_factory.mktemp("tokens") / "tokens")
    made = small_config(
        model={"num_layers": 6, "fan": {"p_ratio": 0.2}},
        data={"train_data": [tokens]},
        training={"run_dir": str(tmp_path_factory.mktemp("runs") / "run"), "global_batch_size": 8},
    )
    return resolve_for_machine(made, h100)


@pytest.fixture(scope="module")
def legal(config: RunConfig, h100: Machine) -> list[list[Estimate]]:
    """Of every legal layout an estimate for each recomputation."""
    return [
        [estimate(layout_name(each, config), each, GPUS, h100) for each in recomputations(layout)]
        for layout in every_layout(config, GPUS)
        if not problems(layout, GPUS)
    ]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_it_finds_what_looking_at_every_layout_finds(
    config: RunConfig, legal: list[list[Estimate]], h100: Machine, share: float
) -> None:
    """On machines on which all layouts fit, on which half do, and on which few do: `share` do not."""
    needed = sorted(each.needed_bytes for layout in legal for each in layout)
    limit = needed[round((1 - share) * (len(needed) - 1))]
    small = dataclasses.replace(h100, memory_bytes=math.ceil(limit / (1 - DRIVERS_SHARE)))
    fitting = [[each for each in layout if each.needed_bytes <= limit] for layout in legal]
    fastest = sorted(min(each.time.seconds for each in layout) for layout in fitting if layout)[:MOST_SHOWN]
    found = search(config, GPUS, small)
    assert [each.time.seconds for each in found.candidates] == fastest
    assert {each.name for each in found.candidates} <= {each.name for layout in fitting for each in layout}
    assert found.legal == len(legal)


def test_it_counts_what_each_rule_rejects(config: RunConfig, h100: Machine) -> None:
    layouts = every_layout(config, GPUS)
    counts = Counter(NUMBERS.sub("N", message) for each in layouts for message in problems(each, GPUS))
    found = search(config, GPUS, h100)
    assert {NUMBERS.sub("N", each.message): each.count for each in found.rejected} == counts
    assert found.judged == len(layouts)


def test_train_says_of_an_example_what_the_search_does(config: RunConfig, h100: Machine) -> None:
    rejected = search(config, GPUS, h100).rejected
    for each in rejected:
        with pytest.raises(InputError) as refused:
            find_start(apply_layout(config, each.example), GPUS)
        assert each.message in str(refused.value).splitlines()
    assert len(rejected) > 3


def test_where_nothing_fits_the_one_that_lacks_least_is_shown(
    config: RunConfig, legal: list[list[Estimate]], h100: Machine
) -> None:
    found = search(config, GPUS, dataclasses.replace(h100, memory_bytes=1))
    (shown,) = found.candidates
    assert not shown.fits
    assert shown.needed_bytes == min(layout[-1].needed_bytes for layout in legal)
    (too_large,) = (each for each in found.rejected if each.example == shown.name)
    assert too_large.count == len(legal)


def test_of_named_layouts_those_that_fit_come_first(
    config: RunConfig, legal: list[list[Estimate]], h100: Machine
) -> None:
    estimates = [layout[0] for layout in legal]
    by_bytes = sorted(each.needed_bytes for each in estimates)
    half = dataclasses.replace(h100, memory_bytes=math.ceil(by_bytes[len(by_bytes) // 2] / (1 - DRIVERS_SHARE)))
    named = [(each.name, apply_layout(config, each.name)) for each in estimates[::7]]
    found = judge(named, GPUS, half).candidates
    order = [(not each.fits, each.time.seconds) for each in found]
    assert order == sorted(order) and len(found) == len(named)
    slowest = max(each.time.seconds for each in found if each.fits)
    assert slowest > min(each.time.seconds for each in found if not each.fits)
