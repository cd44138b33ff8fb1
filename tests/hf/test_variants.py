"""Every variant of FAN against the paper's equations, and what tells the placements apart."""

import pytest
import torch

from megatron_fanformer.hf import FANformerConfig, FANformerForCausalLM
from tests.hf.models import OWN_VALUES, PLACEMENTS, SIZES, VARIANTS, build, some_ids
from tests.plain_model import from_transformers, plain_logits

FLOAT32_LOGITS = 2e-5  # logits of float32 against float64, 3 layers, logits of order 1


def narrow(**fields):
    """A model whose logits are of order 1, with every norm and bias off its initial value."""
    torch.manual_seed(3)
    model = FANformerForCausalLM(FANformerConfig(**SIZES | fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
@torch.no_grad()
def test_logits_are_those_of_the_equations(fields):
    model, ids = narrow(**fields), some_ids(2, 24)
    gelu = model.config.fan_activation == "gelu"
    exact = {name: weight.double() for name, weight in from_transformers(model.state_dict()).items()}
    expected = plain_logits(exact, ids, heads=4, gelu=gelu)
    assert (model(ids).logits - expected).abs().max() < FLOAT32_LOGITS


def test_values_of_their_own_fan_have_no_matrix_behind_it():
    shapes = {name: tuple(w.shape) for name, w in build(**OWN_VALUES).model.layers[0].self_attn.named_parameters()}
    assert shapes == {
        "fan.weight": (24, 32),
        "fan.bias": (24,),
        "q_proj.weight": (32, 32),
        "k_proj.weight": (16, 32),
        "v_fan.weight": (14, 32),  # P = 2, G = 12 of 16
        "v_fan.bias": (14,),
        "o_proj.weight": (32, 32),
    }


def test_the_values_p_is_that_of_the_queries_where_not_stated():
    config = FANformerConfig(**SIZES, fan_placement="qk_and_v", p_ratio=0.3)
    assert config.value_p_ratio == 0.3
    assert FANformerConfig(**SIZES, fan_placement="qk_and_v", p_ratio=0.3, v_p_ratio=0.0).value_p_ratio == 0.0


def test_rows_are_truncated_as_megatrons_are():
    model = build(fan_placement="qk_and_v", p_ratio=0.3)
    attention = model.model.layers[0].self_attn
    assert (attention.fan_activation.sizes, attention.v_fan_activation.sizes) == ([9, 14], [4, 8])


@pytest.mark.parametrize("fields", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_saving_and_loading_changes_nothing(fields, tmp_path):
    for tied in (True, False):
        model = build(**fields, tie_word_embeddings=tied)
        model.save_pretrained(tmp_path / str(tied))
        loaded = FANformerForCausalLM.from_pretrained(tmp_path / str(tied))
        assert torch.equal(loaded(some_ids()).logits, model(some_ids()).logits)


@pytest.mark.parametrize("fields", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_every_weight_has_a_gradient(fields):
    model = build(**fields).train()
    model(some_ids(), labels=some_ids()).loss.backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()] == []
