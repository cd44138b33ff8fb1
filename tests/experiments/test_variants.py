"""The paper's six variants: their sizes, and what tells them apart."""

import dataclasses

import pytest

from megatron_fanformer.errors import CorruptError
from megatron_fanformer.experiments.variants import VARIANTS
from megatron_fanformer.formats.fan_of_tensors import SeenFAN, fan_of_tensors
from megatron_fanformer.formats.name_table import Format, expected_shapes
from megatron_fanformer.model.config import PRESETS, FANConfig, FANformerConfig
from tests.experiments.table_2 import variants

LARGE, LAPTOP = (
    PRESETS["fanformer-1b"],
    FANformerConfig(num_layers=3, hidden_size=64, ffn_hidden_size=176, num_attention_heads=4, vocab_size=500),
)
AUTHORS_D_FF = {"transformer": 8192, "ffn-fan": 16384, "atm": 7508, "atl": 7508, "fanformer": 7680}
"""Of their configurations of the same parameters, half of mlp_hidden_size; of FFN <- FAN all of it, by their mlp_ratio.
"""


@pytest.mark.parametrize(("size", "tolerance"), [(LARGE, 2e-4), (LAPTOP, 6e-3)], ids=["1b", "laptop"])
def test_all_have_the_parameters_of_the_transformer(size: FANformerConfig, tolerance: float) -> None:
    models = variants(size)
    assert list(models) == list(VARIANTS)
    counts = {name: model.num_parameters for name, model in models.items()}
    assert counts == pytest.approx(dict.fromkeys(models, counts["transformer"]), rel=tolerance)
    assert {(model.num_layers, model.hidden_size) for model in models.values()} == {(size.num_layers, size.hidden_size)}


def test_at_1b_d_ff_is_that_of_the_authors_configurations() -> None:
    models = variants(LARGE)
    assert {name: models[name].ffn_hidden_size for name in AUTHORS_D_FF} == AUTHORS_D_FF


def test_at_the_same_dimension_every_width_is_the_sizes_own() -> None:
    models = variants(LARGE, "dimension")
    assert set(models) == set(VARIANTS) - {"ffn-fan"}
    assert {model.ffn_hidden_size for model in models.values()} == {8192}
    assert models["fanformer"] == LARGE


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


@pytest.mark.parametrize("format", ["megatron", "hf", "reference"])
def test_values_of_their_own_are_seen_too(format: Format) -> None:
    fan = FANConfig(placement="qk_and_v", v_p_ratio=0.125, bias=False)
    model = dataclasses.replace(LAPTOP, num_query_groups=2, fan=fan)
    assert fan_of_tensors(expected_shapes(model, format), format) == SeenFAN("qk_and_v", 0.25, 0.125, False)


def test_tensors_without_a_layer_are_refused() -> None:
    shapes = {name: shape for name, shape in expected_shapes(LAPTOP, "megatron").items() if "linear_fc2" not in name}
    with pytest.raises(CorruptError, match=r"have no mlp\.linear_fc2 in layer 0"):
        fan_of_tensors(shapes, "megatron")
