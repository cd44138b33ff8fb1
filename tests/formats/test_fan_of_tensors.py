"""FAN as names and shapes of tensors tell of it, against the configurations that they are of."""

import pytest

from megatron_fanformer.errors import CorruptError
from megatron_fanformer.formats.fan_of_tensors import SeenFAN, fan_of_tensors
from megatron_fanformer.formats.name_table import Format, expected_shapes
from megatron_fanformer.model.config import FANConfig
from megatron_fanformer.model.placements import PLACEMENTS
from tests.tiny import tiny_model

FORMATS: tuple[Format, ...] = ("megatron", "hf", "reference")


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("fan", "seen"),
    [
        (FANConfig(p_ratio=0.25), SeenFAN("qkv", 0.25, None, True)),
        (FANConfig(p_ratio=0.125, bias=False), SeenFAN("qkv", 0.125, None, False)),
        (FANConfig(placement="qk_and_v"), SeenFAN("qk_and_v", 0.25, 0.25, True)),
        (FANConfig(placement="qk_and_v", v_p_ratio=0.125), SeenFAN("qk_and_v", 0.25, 0.125, True)),
        (FANConfig(placement="ffn", p_ratio=0.125), SeenFAN("ffn", 0.125, None, True)),
        (FANConfig(placement="none"), SeenFAN("none", None, None, None)),
    ],
    ids=str,
)
def test_placement_ratios_and_bias_are_seen(format: Format, fan: FANConfig, seen: SeenFAN) -> None:
    if PLACEMENTS[fan.placement].reference_fields is None and format == "reference":
        pytest.skip("the authors' format has no such placement")
    model = tiny_model(num_query_groups=2, fan=fan)  # values are half as wide as the hidden state
    assert fan_of_tensors(expected_shapes(model, format), format) == seen


def test_a_part_of_a_model_is_refused() -> None:
    shapes = expected_shapes(tiny_model(), "megatron")
    with pytest.raises(CorruptError, match="name all tensors of a model"):
        fan_of_tensors({name: shape for name, shape in shapes.items() if "norm" not in name})
