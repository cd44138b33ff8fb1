"""FAN as names and shapes of tensors tell of it, against the configurations that they are of."""

import pytest

from megatron_fanformer.convert.name_table import Format, SeenFAN, expected_shapes, fan_of_tensors, inferred_p_ratio
from megatron_fanformer.errors import CorruptError
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


@pytest.mark.parametrize("hidden_size", [48, 60, 100, 768, 1000])
def test_every_p_ratio_is_inferred_from_the_rows_that_it_gives(hidden_size: int) -> None:
    for periodic in range(hidden_size // 2 + 1):
        p_ratio = inferred_p_ratio(hidden_size - periodic, hidden_size, None)
        assert int(p_ratio * hidden_size) == periodic


def test_a_stated_p_ratio_is_kept_where_it_agrees_and_refused_where_it_does_not() -> None:
    assert inferred_p_ratio(85, 100, 0.157) == 0.157
    for stated in (0.125, float("nan"), float("inf"), "0.25", True, [0.25]):
        with pytest.raises(CorruptError, match=r"p_ratio is stated as .*those of p_ratio 0\.25"):
            inferred_p_ratio(48, 64, stated)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [31, 65])
def test_rows_of_no_fan_map_are_refused(rows: int) -> None:
    with pytest.raises(CorruptError, match="it must have 32 to 64"):
        inferred_p_ratio(rows, 64, None)
