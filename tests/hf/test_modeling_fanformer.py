"""The model as transformers runs it: FAN, attention, loss, checkpointing, initial weights, registration."""

import math
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_fanformer.hf import FANformerConfig, FANformerForCausalLM, FANformerModel
from megatron_fanformer.hf.modeling_fanformer import FANActivation, FANformerRMSNorm, FANformerRotaryEmbedding
from tests.hf.models import SIZES, build, some_ids
from tests.small_runs import ROOT


@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_fan_is_cos_sin_and_g(activation):
    fan = FANActivation(FANformerConfig(**SIZES, fan_activation=activation), width=32, p_ratio=0.3)
    y = torch.randn(2, 3, 23)
    p, g = y[..., :9], y[..., 9:]
    expected = torch.cat([p.cos(), p.sin(), F.gelu(g) if activation == "gelu" else g], dim=-1)
    assert (fan(y) - expected).abs().max() < 2e-6


def test_phases_are_taken_in_float32():
    """Seen in the gradient, -sin(p) dy, which is rounded to bf16 once. The values cannot tell: on a CPU
    torch computes the cos of a bf16 tensor in float32 anyway."""
    fan = FANActivation(FANformerConfig(**SIZES), width=32, p_ratio=0.25)
    y = (20 * torch.randn(64, 24)).to(torch.bfloat16).requires_grad_()
    dy = torch.randn(64, 8).to(torch.bfloat16)
    fan(y)[:, :8].backward(dy)
    assert torch.equal(y.grad[:, :8], (-y[:, :8].float().sin() * dy.float()).to(torch.bfloat16))


def test_rotary_positions_stay_in_float32_in_a_cast_model():
    rotary = build().to(torch.bfloat16).model.rotary_emb
    cos, _ = rotary(torch.zeros(1, dtype=torch.bfloat16), torch.tensor([[60]]))
    exact = math.cos(60 * 10_000 ** (-2 / 8))
    assert cos.dtype == torch.float32
    assert abs(cos[0, 0, 1].item() - exact) < 1e-5


def test_each_row_has_the_rotation_of_its_own_positions():
    """As in a batch of prompts that are padded on the left, the first of which may be the shortest."""
    rotary, rows = build().model.rotary_emb, torch.tensor([[0, 0, 1], [5, 6, 7]])
    for found, *alone in zip(rotary(rows, rows), *(rotary(rows, row[None]) for row in rows), strict=True):
        assert torch.equal(found, torch.cat(alone))


def test_the_norm_is_taken_in_float32():
    norm = FANformerRMSNorm(64, 1e-6).to(torch.bfloat16)
    x = (100 * torch.randn(32, 64)).to(torch.bfloat16)
    expected = F.rms_norm(x.float(), (64,), eps=1e-6).to(torch.bfloat16)
    assert torch.equal(norm(x), expected)


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_eager_equals_sdpa(groups):
    ids = some_ids()
    eager, sdpa = (build(kind, num_key_value_heads=groups)(ids).logits for kind in ("eager", "sdpa"))
    assert (eager - sdpa).abs().max() < 1e-4


@pytest.mark.full  # torch compiles it, in 10 s
@torch.no_grad()  # and has no backward for it on a CPU
def test_eager_equals_flex_attention():
    ids = some_ids()
    assert (build("eager")(ids).logits - build("flex_attention")(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_token_does_not_see_later_ones(attention):
    model, ids = build(attention), some_ids()
    changed = ids.clone()
    changed[:, 6] = 1
    before, after = model(ids).logits, model(changed).logits
    assert (before[:, :6] - after[:, :6]).abs().max() < 1e-5
    assert (before[:, 6:] - after[:, 6:]).abs().max() > 1e-2


def with_checkpointing(model):
    """A model whose layers run again in backward; transformers 5.20 (Python 3.10) has the older names alone."""
    newer = hasattr(model, "activation_checkpointing_enable")
    model.activation_checkpointing_enable() if newer else model.gradient_checkpointing_enable()
    assert model.is_activation_checkpointing if newer else model.is_gradient_checkpointing
    return model


def test_gradient_checkpointing_runs_the_layers_again_and_changes_no_gradient():
    plain, checkpointed, calls = build().train(), with_checkpointing(build().train()), []
    # Before the layer's last map: torch stops the second run at the last tensor that backward needs.
    checkpointed.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    for model in (plain, checkpointed):
        model(some_ids(), labels=some_ids()).loss.backward()
    assert len(calls) == 2
    pairs = zip(plain.named_parameters(), checkpointed.parameters(), strict=True)
    assert [name for (name, left), right in pairs if not torch.equal(left.grad, right.grad)] == []


def test_the_loss_is_that_of_the_next_token():
    model, ids = build(), some_ids()
    out = model(ids, labels=ids)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(out.loss - expected) < 1e-5


def test_the_loss_of_a_part_of_a_batch_is_its_share():
    """As transformers' Trainer accumulates gradients: sums over the tokens of all parts, those that count."""
    model, ids = build(), some_ids(4)
    labels = ids.masked_fill(ids % 3 == 0, -100)
    counted = (labels[:, 1:] != -100).sum()
    parts = [model(ids[i : i + 2], labels=labels[i : i + 2], num_items_in_batch=counted).loss for i in (0, 2)]
    assert abs(sum(parts) - model(ids, labels=labels).loss) < 1e-5


def test_logits_can_be_kept_for_the_last_tokens_alone():
    model, ids = build(), some_ids()
    assert (model(ids, logits_to_keep=2).logits - model(ids).logits[:, -2:]).abs().max() < 1e-5


def test_embeddings_may_stand_in_for_ids():
    model, ids = build(), some_ids()
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)
    with pytest.raises(ValueError, match="not both"):
        model(ids, inputs_embeds=model.get_input_embeddings()(ids))


def test_hidden_states_and_attentions_are_returned_on_request():
    out = build("eager")(some_ids(), output_hidden_states=True, output_attentions=True)
    assert len(out.hidden_states) == 4
    assert [tuple(weights.shape) for weights in out.attentions] == [(2, 4, 11, 11)] * 3


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_the_embedding_where_tied(tied):
    model = build(tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied


def test_initial_weights_are_mitchells():
    torch.manual_seed(0)
    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512}
    model = FANformerForCausalLM(FANformerConfig(**sizes, tie_word_embeddings=False))
    layer, d = model.model.layers[2], 256
    expected = {
        model.model.embed_tokens.weight: d**-0.5,
        model.lm_head.weight: d**-0.5,
        layer.self_attn.fan.weight: d**-0.5,
        layer.self_attn.k_proj.weight: d**-0.5,
        layer.mlp.gate_proj.weight: d**-0.5,
        layer.self_attn.o_proj.weight: (2 * d * 3) ** -0.5,
        layer.mlp.down_proj.weight: (2 * 512 * 3) ** -0.5,
    }
    cut = 0.9866  # standard deviation of a unit normal cut at 3
    for weight, std in expected.items():
        assert abs(weight.std().item() / std - cut) < 0.02
        assert weight.abs().max().item() <= 3 * std * (1 + 1e-6)
    assert not layer.self_attn.fan.bias.any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"p_ratio": 0.6}, r"p_ratio 0\.6 must lie in \[0, 0\.5\]"),
        ({"hidden_size": 30}, "hidden_size 30 must be a multiple"),
        ({"num_key_value_heads": 3}, "num_key_value_heads 3 must divide"),
        ({"fan_activation": "relu"}, "fan_activation 'relu'"),
        ({"fan_placement": "qk"}, "fan_placement 'qk'"),
        ({"fan_placement": "qk_and_v", "v_p_ratio": -0.1}, r"v_p_ratio -0\.1 must lie in \[0, 0\.5\]"),
        ({"v_p_ratio": 0.25}, r"v_p_ratio 0\.25 applies only to fan_placement 'qk_and_v', not 'qkv'"),
        ({"rope_parameters": {"rope_type": "alibi", "factor": 2.0}}, "rope_type 'alibi', which must be one of"),
        ({"rope_scaling": {"rope_type": "alibi", "factor": 2.0}}, "rope_type 'alibi', which must be one of"),
    ],
)
def test_impossible_configurations_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        FANformerConfig(**SIZES | fields)


def test_an_argument_that_forward_does_not_know_is_refused():
    """The cache was swallowed like this when transformers gave it another name."""
    for model in (build(), build().model):
        with pytest.raises(TypeError, match="forward got past_keys, which FANformer does not know"):
            model(some_ids(), past_keys=DynamicCache())
        with pytest.raises(TypeError, match="got past_keys"):
            model(some_ids(), kwargs={"past_keys": DynamicCache()})


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_positions_are_those_of_llama(kind):
    """By today's `rope_parameters`, and by the fields of older exports."""
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 16}
    scaling = {name: value for name, value in scaling.items() if kind == "yarn" or "original" not in name}
    today = FANformerConfig(**SIZES, rope_parameters={"rope_theta": 500.0, **scaling})
    before = FANformerConfig(**SIZES, rope_theta=500.0, rope_scaling=dict(scaling))
    assert today.rope_parameters == before.rope_parameters
    llama = LlamaRotaryEmbedding(LlamaConfig(**SIZES, rope_parameters={"rope_theta": 500.0, **scaling}))
    positions = torch.arange(64)[None]
    for ours, theirs in zip(
        FANformerRotaryEmbedding(today)(torch.zeros(1), positions), llama(torch.zeros(1), positions), strict=True
    ):
        assert (ours - theirs).abs().max() < 1e-6


def test_bf16_is_loaded_in_bf16_and_stays_near(tmp_path):
    """Rotary positions, phases, norms and softmax are computed in float32; logits differ by bf16's rounding."""
    model = build()
    model.save_pretrained(tmp_path)
    low = FANformerForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {weight.dtype for weight in low.parameters()} == {torch.bfloat16}
    exact, rounded = model(some_ids()).logits, low(some_ids()).logits
    assert rounded.dtype == torch.bfloat16
    assert (exact - rounded).norm() / exact.norm() < 0.06  # 0.028 measured, of weights drawn wide


def test_the_auto_classes_know_the_model(tmp_path):
    build().save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is FANformerConfig
    assert type(AutoModel.from_pretrained(tmp_path)) is FANformerModel
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is FANformerForCausalLM


def test_importing_the_package_imports_no_transformers():
    code = "import megatron_fanformer, sys; print('transformers' in sys.modules, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
