"""Stages that take equally long."""

import dataclasses

import pytest

from megatron_fanformer.model.config import PRESETS, FANformerConfig
from megatron_fanformer.model.layout_rules import layout_problems
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.sizing.balanced_stages import balanced_layouts

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
