"""Layouts that a model or a batch does not allow: refused with the rule and the nearest legal value."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_fanformer.model.config import PRESETS, FANConfig
from megatron_fanformer.model.layout_rules import batch_problems, layout_problems
from megatron_fanformer.model.layouts import layout_fields
from megatron_fanformer.runtime.layout import ParallelConfig

MODEL = PRESETS["fanformer-1b"]  # 16 layers, 16 heads, h 2048
OWN_VALUES, FAN_FFN = FANConfig(placement="qk_and_v"), FANConfig(placement="ffn")


def test_chunks_of_a_layout_of_ones_own() -> None:
    """As megatron-core reads it: repetitions of groups, then of letters."""
    parallel = ParallelConfig(pipeline_model_parallel_size=4, pipeline_model_parallel_layout="E, t*2 | (tt|)*5 t, | L")
    assert parallel.problems() == []
    assert parallel.virtual_stages == 2
    assert parallel.segments(13) == [[2, 2, 2, 2], [2, 2, 1, 0]]
    assert parallel.layers_per_stage(13) == [4, 4, 3, 2]


def test_chunks_of_interleaved_stages_share_the_layers() -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    assert parallel.segments(8) == [[2, 2], [2, 2]]


OWN_STAGES = {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"sequence_parallel": True}, "sequence_parallel is true at tensor_model_parallel_size 1"),
        ({"tensor_model_parallel_size": 2, "fan_form": "sequence"}, "fan_form is sequence without sequence"),
        ({"virtual_pipeline_model_parallel_size": 2}, "no schedule to interleave"),
        ({"num_layers_in_first_pipeline_stage": 2}, "num_layers_in_first_pipeline_stage is 2 at"),
        ({"overlap_param_gather": True}, "without overlap_grad_reduce"),
        ({"overlap_param_gather": True, "overlap_grad_reduce": False}, "without overlap_grad_reduce"),
        (
            {"overlap_param_gather": True, "overlap_grad_reduce": True, "use_distributed_optimizer": False},
            "without use_distributed_optimizer",
        ),
        ({**OWN_STAGES, "pipeline_model_parallel_layout": "Ett|tt"}, "is 'Ett|tt'; it must begin with E, end with L"),
        ({**OWN_STAGES, "pipeline_model_parallel_layout": "E|tmt|L|"}, "at most 10,000 layers t between"),
        ({**OWN_STAGES, "pipeline_model_parallel_layout": "Et|t|L"}, "of 3 chunks, and pipeline_model_parallel_size 2"),
        ({"pipeline_model_parallel_layout": "EttL"}, "at pipeline_model_parallel_size 1; set it to null"),
        ({**OWN_STAGES, "pipeline_model_parallel_layout": "Et||t|L"}, "in which chunk 1 is empty; give it a layer t"),
        (
            {**OWN_STAGES, "pipeline_model_parallel_layout": "Et|tL", "num_layers_in_last_pipeline_stage": 1},
            "num_layers_in_first_pipeline_stage or …_last_… given",
        ),
        ({"recompute_granularity": "full"}, "set them to uniform and 1"),
        ({"recompute_granularity": "full", "recompute_method": "uniform"}, "set them to uniform and 1"),
        ({"recompute_num_layers": 1}, "are for recompute_granularity full"),
        ({"recompute_granularity": "selective", "recompute_modules": []}, "recompute_modules is empty"),
        ({"context_parallel_size": 0}, "context_parallel_size is 0; it must be at least 1"),
    ],
)
def test_a_layout_that_contradicts_itself(fields: dict[str, Any], part: str) -> None:
    (problem,) = ParallelConfig(**fields).problems()
    assert part in problem


TWELVE = "pp=2,num_layers_in_first_pipeline_stage=12"
TWO_GROUPS = {"hidden_size": 1536, "num_attention_heads": 24, "num_query_groups": 2, "ffn_hidden_size": 4608}
FAN_AGAIN = "recompute=selective,recompute_modules=[fan]"


@pytest.mark.parametrize(
    ("model", "layout", "part"),
    [
        ({}, "tp=32", "choose one of 1, 2, 4, 8, 16"),
        ({"num_query_groups": 4}, "tp=8", None),
        ({"num_query_groups": 4, "fan": OWN_VALUES}, "tp=8", "(model.num_query_groups 4); choose one of 1, 2, 4"),
        # (24 + 2 x 2) x 64 rows of queries, keys and values
        (TWO_GROUPS, "tp=6", "(model.num_query_groups 2); choose one of 1, 2, 4, 8"),
        (TWO_GROUPS, "tp=4", None),
        # two ranks share a group; each has one head of it
        ({"num_query_groups": 4}, "tp=8,cp=2,cp_comm_type=a2a", "deals a rank's 1 heads of keys out to 2 context"),
        ({"fan": FANConfig(p_ratio=0.1)}, "tp=8", "the nearest valid model.fan.p_ratio is"),
        ({"fan": FANConfig(p_ratio=0.1)}, "tp=8,sp=true,fan=sequence", None),
        ({"fan": replace(OWN_VALUES, v_p_ratio=0.1)}, "tp=8", "the nearest valid model.fan.v_p_ratio is"),
        ({}, "pp=3", "1, 2, 4, 8, 16, or set parallel.num_layers_in_last_pipeline_stage to 4"),
        ({}, "pp=3,num_layers_in_last_pipeline_stage=4", None),
        (
            {},
            "pp=4,num_layers_in_first_pipeline_stage=8,num_layers_in_last_pipeline_stage=8",
            "the pipeline stages have 8, 0, 0, 8 layers; each must have at least 1",
        ),
        ({}, "pp=4,num_layers_in_first_pipeline_stage=5", "less the 5 of"),
        ({}, "pp=2,pipeline_model_parallel_layout=Et*6|(t*5|)*2L", None),
        ({}, "pp=2,pipeline_model_parallel_layout=Et*8|t*7L", "has 15 layers t, and model.num_layers is 16"),
        (
            {},
            "pp=2,recompute=full,recompute_num_layers=2,pipeline_model_parallel_layout=Et*7|t*9L",
            "recompute_num_layers 2 does not divide the 7, 9 layers of the stages' chunks",
        ),
        ({}, "pp=2,vpp=3", "does not divide the layers of each stage, 8, 8; choose one of 1, 2, 4, 8"),
        ({}, "pp=2,recompute=full,recompute_num_layers=3", "choose one of 1, 2, 4, 8"),
        ({"num_layers": 32}, f"{TWELVE},vpp=3", "the layers of each stage, 12, 20; choose one of 1, 2, 4"),
        ({"num_layers": 32}, f"{TWELVE},recompute=full,recompute_num_layers=3", "requires; choose one of 1, 2, 4"),
        ({"fan": FANConfig(placement="none")}, FAN_AGAIN, "recompute_modules has fan, but model.fan.placement is none"),
        ({"fan": FAN_FFN}, FAN_AGAIN, "name mlp in its place"),
        (
            {"fan": FAN_FFN, "ffn_hidden_size": 8200},
            "tp=8",
            "does not divide the FAN map's 2050 periodic and 4100 linear rows (model.fan.p_ratio 0.25); the nearest",
        ),
        ({"fan": FAN_FFN}, "tp=8,sp=true,fan=sequence", "parallel.fan_form is sequence at model.fan.placement ffn"),
        ({"fan": OWN_VALUES}, FAN_AGAIN, "it frees X_F, 2048 wide, and keeps p | g of both outputs, 3072 wide"),
        ({"seq_length": 1000}, "cp=3", "not a multiple of 6"),
        ({"seq_length": 1002}, "cp=3,tp=4,sp=true", "not a multiple of 12"),
    ],
)
def test_a_layout_that_the_model_does_not_allow(model: dict[str, Any], layout: str, part: str | None) -> None:
    problems = layout_problems(replace(MODEL, **model), ParallelConfig(**layout_fields(layout)))
    assert (problems == []) if part is None else any(part in problem for problem in problems)


@pytest.mark.parametrize(
    ("layout", "replicas", "batch", "part"),
    [
        ("", 3, 16, "the nearest is 18"),
        ("pp=4", 1, 6, None),
        ("pp=4,vpp=2", 1, 12, "the nearest global batch size is 16"),
    ],
)
def test_a_batch_that_the_layout_does_not_allow(layout: str, replicas: int, batch: int, part: str | None) -> None:
    problems = batch_problems(ParallelConfig(**layout_fields(layout)), replicas, batch, micro_batch_size=2)
    assert (problems == []) if part is None else part in problems[0]


@pytest.mark.parametrize(
    ("first", "last", "layers"),
    [
        (None, None, [4, 4, 4, 4]),
        (2, None, None),
        (1, None, [1, 5, 5, 5]),
        (3, 3, [3, 5, 5, 3]),
        (None, 1, [5, 5, 5, 1]),
    ],
)
def test_layers_of_each_stage(first: int | None, last: int | None, layers: list[int] | None) -> None:
    config = ParallelConfig(
        pipeline_model_parallel_size=4,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )
    assert config.layers_per_stage(16) == layers
