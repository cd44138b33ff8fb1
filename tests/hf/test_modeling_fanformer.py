"""The model as transformers runs it: attention, cache, padding, checkpointing, loading, registration."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from megatron_fanformer.hf import FANformerConfig, FANformerForCausalLM, FANformerModel
from megatron_fanformer.hf.modeling_fanformer import FANProjection

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
ROOT = Path(__file__).parent.parent.parent


def build(attention="sdpa", **fields):
    """A random model in float32; weights drawn wide, so that greedy choices are far from ties."""
    torch.manual_seed(0)
    config = FANformerConfig(**SIZES | fields)
    model = FANformerForCausalLM._from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def some_ids(batch=2, length=11):
    return torch.randint(2, 61, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def greedy_without_cache(model, ids, steps):
    for _ in range(steps):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("bias", [True, False])
def test_fan_is_cos_sin_and_g(activation, bias):
    fan = FANProjection(FANformerConfig(**SIZES, p_ratio=0.3, fan_activation=activation, fan_bias=bias))
    for parameter in fan.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 3, 32)
    y = x @ fan.weight.T + (fan.bias if bias else 0.0)
    p, g = y[..., :9], y[..., 9:]
    expected = torch.cat([p.cos(), p.sin(), F.gelu(g) if activation == "gelu" else g], dim=-1)
    assert (fan(x) - expected).abs().max() < 2e-5


def test_phases_are_taken_in_float32():
    """Seen in the gradient, -sin(p) dy, which is rounded to bf16 once. The values cannot tell: on a CPU
    torch computes the cos of a bf16 tensor in float32 anyway."""
    fan = FANProjection(FANformerConfig(**SIZES, fan_bias=False)).to(torch.bfloat16)
    fan.weight.data = torch.eye(24, 32, dtype=torch.bfloat16)
    x = (20 * torch.randn(64, 32)).to(torch.bfloat16).requires_grad_()
    dy = torch.randn(64, 8).to(torch.bfloat16)
    fan(x)[:, :8].backward(dy)
    assert torch.equal(x.grad[:, :8], (-x[:, :8].float().sin() * dy.float()).to(torch.bfloat16))


def test_rotary_positions_stay_in_float32_in_a_cast_model():
    rotary = build().to(torch.bfloat16).model.rotary_emb
    cos, _ = rotary(torch.tensor([[60]]))
    exact = math.cos(60 * 10_000 ** (-2 / 8))
    assert cos.dtype == torch.float32
    assert abs(cos[0, 0, 0, 1].item() - exact) < 1e-5


@pytest.mark.parametrize("groups", [4, 2, 1])
def test_eager_equals_sdpa(groups):
    ids = some_ids()
    eager, sdpa = (build(kind, num_key_value_heads=groups)(ids).logits for kind in ("eager", "sdpa"))
    assert (eager - sdpa).abs().max() < 1e-4


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_token_does_not_see_later_ones(attention):
    model, ids = build(attention), some_ids()
    changed = ids.clone()
    changed[:, 6] = 1
    before, after = model(ids).logits, model(changed).logits
    assert (before[:, :6] - after[:, :6]).abs().max() < 1e-5
    assert (before[:, 6:] - after[:, 6:]).abs().max() > 1e-2


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_generation_with_the_cache_is_that_without(attention):
    model, ids = build(attention), some_ids()
    cached = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert torch.equal(cached, greedy_without_cache(model, ids, 12))


def test_logits_from_the_cache_are_those_of_the_whole():
    model, ids = build(), some_ids()
    first = model(ids[:, :7], use_cache=True)
    second = model(ids[:, 7:], past_key_values=first.past_key_values)
    joined = torch.cat([first.logits, second.logits], dim=1)
    assert (joined - model(ids).logits).abs().max() < 1e-4


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_left_padded_batch_generates_what_its_rows_do_alone(attention):
    model = build(attention)
    prompts = [row[:length] for row, length in zip(some_ids(3), (11, 4, 7), strict=True)]
    batch = torch.stack([F.pad(prompt, (11 - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([F.pad(torch.ones_like(prompt), (11 - len(prompt), 0)) for prompt in prompts])
    together = model.generate(batch, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    alone = [greedy_without_cache(model, prompt[None], 8)[0, -8:] for prompt in prompts]
    assert torch.equal(together[:, -8:], torch.stack(alone))


def test_generation_stops_at_the_end_of_text():
    model, ids = build(), some_ids(1)
    unbounded = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 11:]
    stop = unbounded[3].item()
    stopped = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=stop, pad_token_id=0)
    assert stopped[0, -1] == stop and len(stopped[0]) <= 11 + 4


def test_gradient_checkpointing_changes_no_gradient():
    plain, checkpointed = build().train(), build().train()
    checkpointed.gradient_checkpointing_enable()
    assert checkpointed.is_gradient_checkpointing
    for model in (plain, checkpointed):
        model(some_ids(), labels=some_ids()).loss.backward()
    pairs = zip(plain.named_parameters(), checkpointed.parameters(), strict=True)
    assert [name for (name, left), right in pairs if not torch.equal(left.grad, right.grad)] == []


def test_gradient_checkpointing_runs_the_layers_again():
    model, calls = build().train(), []
    model.gradient_checkpointing_enable()
    # Before the layer's last map: torch stops the second run at the last tensor that backward needs.
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    model(some_ids(), labels=some_ids()).loss.backward()
    assert len(calls) == 2


def test_the_loss_is_that_of_the_next_token():
    model, ids = build(), some_ids()
    out = model(ids, labels=ids)
    expected = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert abs(out.loss - expected) < 1e-5


def test_logits_can_be_kept_for_the_last_tokens_alone():
    model, ids = build(), some_ids()
    assert (model(ids, logits_to_keep=2).logits - model(ids).logits[:, -2:]).abs().max() < 1e-5


def test_embeddings_may_stand_in_for_ids():
    model, ids = build(), some_ids()
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)


def test_both_ids_and_embeddings_are_refused():
    model, ids = build(), some_ids()
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


@pytest.mark.parametrize("fields", [{}, {"tie_word_embeddings": False}, {"fan_placement": "none"}])
def test_saving_and_loading_changes_nothing(fields, tmp_path):
    model = build(**fields)
    model.save_pretrained(tmp_path)
    loaded = FANformerForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(some_ids()).logits, model(some_ids()).logits)


def test_a_transformer_has_no_fan():
    assert not [name for name, _ in build(fan_placement="none").named_parameters() if ".fan." in name]


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
    ],
)
def test_impossible_configurations_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        FANformerConfig(**SIZES | fields)


def test_the_auto_classes_know_the_model(tmp_path):
    build().save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is FANformerConfig
    assert type(AutoModel.from_pretrained(tmp_path)) is FANformerModel
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is FANformerForCausalLM


def test_importing_the_package_imports_no_transformers():
    code = "import megatron_fanformer, sys; print('transformers' in sys.modules, 'torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
