"""Layouts as text."""

import dataclasses

import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import KernelsConfig
from megatron_fanformer.model.layouts import configured_layout, parse_layout
from megatron_fanformer.runtime.layout import ParallelConfig, layout_chunks


@pytest.mark.parametrize(
    "text", ["tp=2,recompute=selective,recompute_modules=[fan]", "recompute_modules=[mlp,fan],pp=2"]
)
def test_a_list_is_read_and_written(text: str) -> None:
    layout = parse_layout(text, "local")
    assert layout.parallel.recompute_modules[-1] == "fan"
    written, _ = configured_layout(layout.parallel, layout.kernels)
    assert parse_layout(written, "local") == layout


def test_stages_with_commas_and_blanks_are_written_without_them() -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="E, t |\tt*2, L")
    written, layout = configured_layout(parallel, KernelsConfig(transformer_impl="local"))
    stages = "Et|t*2L"
    assert written == f"pp=2,pipeline_model_parallel_layout={stages},distributed_optimizer=true"
    read = parse_layout(written, "local")
    assert read.parallel == dataclasses.replace(layout.parallel, pipeline_model_parallel_layout=stages)
    assert layout_chunks(stages) == layout_chunks(parallel.pipeline_model_parallel_layout or "")


def test_an_unknown_module_is_refused() -> None:
    with pytest.raises(InputError, match="recompute_modules"):
        parse_layout("recompute=selective,recompute_modules=[fan,fun]")
