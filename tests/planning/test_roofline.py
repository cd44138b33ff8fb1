"""The parts of a step: their FLOPs against the formula of the whole, and bytes counted by hand for a small model."""

import pytest

from megatron_fanformer.model.config import PRESETS, FANConfig, FANformerConfig
from megatron_fanformer.planning.flops import training_flops_per_token
from tools.roofline import Part, step_parts

MODELS = [*PRESETS.values()]


@pytest.mark.parametrize("model", MODELS, ids=PRESETS)
def test_flops_are_those_of_the_formula(model: FANformerConfig) -> None:
    parts = step_parts(model, tokens=4096, element_bytes=2, state_bytes=8)
    assert sum(part.flops for part in parts) == 4096 * training_flops_per_token(model)


def test_bytes_of_a_small_model() -> None:
    model = FANformerConfig(
        num_layers=2, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, vocab_size=128, seq_length=4
    )
    parts = {part.name: part.bytes for part in step_parts(model, tokens=10, element_bytes=2, state_bytes=8)}
    layers, m, e = 2, 10, 2
    # p_ratio 0.25 of 8: 2 periodic and 4 linear rows. Reads p | g (6), writes X_F (8); backward reads cos, sin (4) and
    # the gradient (8), and writes that of p | g (6).
    assert parts["FAN activation"] == layers * m * e * (6 + 8 + 4 + 8 + 6)
    assert parts["SwiGLU"] == layers * m * e * 16 * (2 + 1 + 2 + 1 + 2)
    # [10, 8] x [8, 6]: forward and the input's gradient touch all three, the weight's own adds to float32.
    product = e * (10 * 8 + 6 * 8 + 10 * 6)
    assert parts["FAN map"] == layers * (2 * product + e * (10 * 8 + 10 * 6) + 8 * 6 * 8)
    assert parts["optimizer"] == model.num_parameters * (16 + 16 + 2)  # the bf16 weight is written too


def test_without_fan_there_are_no_parts_of_it() -> None:
    model = FANformerConfig(
        num_layers=1,
        hidden_size=8,
        ffn_hidden_size=16,
        num_attention_heads=2,
        vocab_size=128,
        fan=FANConfig(placement="none"),
    )
    assert not {part.name for part in step_parts(model, tokens=1, element_bytes=2, state_bytes=8)} & {
        "FAN map",
        "FAN activation",
    }


def test_the_longer_of_both_decides() -> None:
    part = Part(name="", flops=100, bytes=10)
    assert part.seconds(flops_per_second=10, bytes_per_second=10) == 10
    assert part.seconds(flops_per_second=1000, bytes_per_second=10) == 1
