"""Layouts as text."""

import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.model.layouts import own_layout, parse_layout


@pytest.mark.parametrize(
    "text", ["tp=2,recompute=selective,recompute_modules=[fan]", "recompute_modules=[mlp,fan],pp=2"]
)
def test_a_list_is_read_and_written(text: str) -> None:
    layout = parse_layout(text, "local")
    assert layout.parallel.recompute_modules[-1] == "fan"
    written, _ = own_layout(layout.parallel, layout.kernels)
    assert parse_layout(written, "local") == layout


def test_an_unknown_module_is_refused() -> None:
    with pytest.raises(InputError, match="recompute_modules"):
        parse_layout("recompute=selective,recompute_modules=[fan,fun]")
