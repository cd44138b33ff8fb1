"""The paper's six variants: their sizes, and what tells them apart."""

import dataclasses

import pytest

from megatron_fanformer.convert.name_table import Format, SeenFAN, expected_shapes, fan_of_tensors
from megatron_fanformer.model.config import PRESETS, FANConfig, FANformerConfig
from tests.experiments.table_2 import VARIANTS, variants

LARGE, LAPTOP = (
    PRESETS["fanformer-1b"],
    FANformerConfig(num_layers=3, hidden_size=64, ffn_hidden_size=176, num_attention_heads=4, vocab_size=500),
)


@pytest.mark.parametrize(("size", "tolerance"), [(LARGE, 2e-4), (LAPTOP, 6e-3)], ids=["1b", "laptop"])
def test_all_have_the_parameters_of_the_transformer(size: FANformerConfig, tolerance: float) -> None:
    models = variants(size)
    assert list(models) == list(VARIANTS)
    counts = {name: model.num_parameters for name, model in models.items()}
    assert counts == pytest.approx(dict.fromkeys(models, counts["transformer"]), rel=tolerance)
    assert {(model.num_layers, model.hidden_size) for model in models.values()} == {(size.num_layers, size.hidden_size)}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("format", ["megatron", "hf", "reference"])
def test_tensors_alone_tell_a_variant_but_for_a_gelu(name: str, format: Format) -> None:
    """ATM and ATL have the same tensors, and so have original FAN and FANformer."""
    if (name, format) == ("ffn-fan", "reference"):
        pytest.skip("the authors' format has no such tensors")
    model = variants(dataclasses.replace(LAPTOP, fan=FANConfig(p_ratio=0.125)))[name]
    shapes = expected_shapes(model, format)
    seen = fan_of_tensors(shapes, format)
    if name == "transformer":
        assert seen == SeenFAN("none", None, None, None)
    else:
        assert seen == SeenFAN(model.fan.placement, model.fan.p_ratio, None, True)
