"""The paper's sizes, and the rules of a model's shape."""

import dataclasses

import pytest

from megatron_fanformer.model.config import PRESETS, FANConfig, FANformerConfig, nearest_p_ratio, p_ratio_of

SIZES = ("300m", "600m", "1b", "3b", "7b")


@pytest.mark.parametrize("size", SIZES)
def test_the_form_of_equal_parameters_is_as_large_as_the_transformer(size: str) -> None:
    transformer = PRESETS[f"fanformer-{size}-transformer"].num_parameters
    assert PRESETS[f"fanformer-{size}-same-params"].num_parameters == pytest.approx(transformer, rel=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_the_fan_map_is_all_that_a_fanformer_adds_to_its_twin(size: str) -> None:
    fanformer, twin = PRESETS[f"fanformer-{size}"], PRESETS[f"fanformer-{size}-transformer"]
    rows = fanformer.hidden_size * 3 // 4
    added = fanformer.num_layers * rows * (fanformer.hidden_size + 1)
    assert fanformer.num_parameters - twin.num_parameters == added


def test_parameters_of_the_reference_cases() -> None:
    tied = FANformerConfig(num_layers=3, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, vocab_size=250)
    assert tied.num_parameters == 149_072  # the reference's own count
    untied = dataclasses.replace(
        tied, num_layers=4, untie_embeddings_and_output_weights=True, fan=FANConfig(p_ratio=0.125)
    )
    assert untied.num_parameters == 211_744


def test_every_preset_is_sound() -> None:
    assert [problem for preset in PRESETS.values() for problem in preset.problems()] == []


@pytest.mark.parametrize("hidden_size", [49, 64, 100, 768, 2048])
def test_a_p_ratio_gives_back_its_periodic_size(hidden_size: int) -> None:
    for periodic in range(hidden_size // 2 + 1):
        assert int(p_ratio_of(periodic, hidden_size) * hidden_size) == periodic


def test_the_nearest_p_ratio_divides_over_the_ranks() -> None:
    nearest = nearest_p_ratio(0.261, 2048, 8)
    assert nearest is not None
    assert int(nearest * 2048) == 536  # int(0.261 * 2048) = 534
    assert nearest_p_ratio(0.261, 2048, 3) is None


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("num_layers", 0, "num_layers is 0"),
        ("num_attention_heads", 3, "not a multiple of model.num_attention_heads"),
        ("num_query_groups", 3, "does not divide model.num_attention_heads"),
        ("fan", FANConfig(p_ratio=0.6), "must lie in [0, 0.5]"),
    ],
)
def test_a_broken_rule_is_named(field: str, value: object, part: str) -> None:
    problems = dataclasses.replace(PRESETS["fanformer-1b"], **{field: value}).problems()
    assert len(problems) == 1
    assert part in problems[0]
