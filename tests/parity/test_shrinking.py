"""A small run keeps what decides about layouts: all that are legal for the large one are legal for it."""

import dataclasses
from typing import Any

import pytest

from megatron_fanformer.model.config import PRESETS, FANConfig
from megatron_fanformer.model.layout_rules import batch_problems, layout_problems
from megatron_fanformer.parity.shrinking import shrink
from megatron_fanformer.runtime.layout import ParallelConfig

MODELS = {
    "1b": PRESETS["fanformer-1b"],
    "7b grouped": dataclasses.replace(PRESETS["fanformer-7b"], num_query_groups=8),
    "one key head": dataclasses.replace(PRESETS["fanformer-1b"], num_query_groups=1),
    "own values": dataclasses.replace(PRESETS["fanformer-1b"], fan=FANConfig(placement="qk_and_v", v_p_ratio=0.125)),
    "values by p_ratio": dataclasses.replace(
        PRESETS["fanformer-7b"], num_query_groups=8, fan=FANConfig(placement="qk_and_v", p_ratio=304 / 4096)
    ),
    "few periodic rows": dataclasses.replace(PRESETS["fanformer-1b"], fan=FANConfig(p_ratio=32 / 2048)),
    "transformer": PRESETS["fanformer-1b-transformer"],
    "FAN layers for the MLP": dataclasses.replace(PRESETS["fanformer-1b"], fan=FANConfig(placement="ffn")),
}
LAYOUTS = {
    "tp2": ParallelConfig(tensor_model_parallel_size=2),
    "tp8 sp": ParallelConfig(tensor_model_parallel_size=8, sequence_parallel=True),
    "tp4 cp2 sp": ParallelConfig(tensor_model_parallel_size=4, sequence_parallel=True, context_parallel_size=2),
    "pp4 vpp2": ParallelConfig(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2),
    "pp2 dp3": ParallelConfig(pipeline_model_parallel_size=2, data_parallel_size=3),
    "pp2 uneven": ParallelConfig(pipeline_model_parallel_size=2, num_layers_in_last_pipeline_stage=3),
}


@pytest.mark.parametrize("name", MODELS)
def test_layouts_that_are_legal_stay_so(name: str) -> None:
    model = MODELS[name]
    layouts = [layout for layout in LAYOUTS.values() if not layout_problems(model, layout)]
    assert len(layouts) > 1
    small = shrink(model, 4, layouts)
    assert small.model.problems() == []
    for layout in layouts:
        assert layout_problems(small.model, layout) == []
        assert bool(shrink(model, 4, [layout]).model.periodic_units) == bool(model.periodic_units)
        replicas = layout.data_parallel_size or 1
        assert batch_problems(layout, replicas, small.global_batch_size, small.micro_batch_size) == []
        assert small.global_batch_size // (small.micro_batch_size * replicas) >= 2


@pytest.mark.parametrize("degrees", [{}, {"pipeline_model_parallel_size": 2}], ids=str)
def test_layers_can_be_recomputed_as_many_at_a_time(degrees: dict[str, Any]) -> None:
    full = {"recompute_granularity": "full", "recompute_num_layers": 8}
    layouts = {method: ParallelConfig(**degrees, **full, recompute_method=method) for method in ("uniform", "block")}
    small = shrink(MODELS["1b"], 4, [layouts["uniform"]]).model
    assert small.num_layers == 8 * degrees.get("pipeline_model_parallel_size", 1)
    assert layout_problems(small, layouts["uniform"]) == []
    assert shrink(MODELS["1b"], 4, [layouts["block"]]).model.num_layers == 4  # which recomputes all, if they are fewer


@pytest.mark.parametrize("name", MODELS)
def test_ratios_are_kept(name: str) -> None:
    model = MODELS[name]
    small = shrink(model, 1, [LAYOUTS["tp2"]]).model
    assert small.num_parameters < model.num_parameters / 100
    assert small.num_attention_heads / small.query_groups == model.num_attention_heads / model.query_groups
    assert small.ffn_hidden_size / small.hidden_size == model.ffn_hidden_size / model.hidden_size
    assert small.padded_vocab_size > small.vocab_size
    assert small.fan.placement == model.fan.placement
