"""The model as transformers runs it: FAN, attention, loss, checkpointing, initial weights, registration."""

import re
import runpy
import sys

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from megatron_fanformer.hf import FANformerConfig, FANformerForCausalLM, configuration_fanformer
from megatron_fanformer.hf.modeling_fanformer import FANActivation, FANformerRMSNorm, FANformerRotaryEmbedding
from tests.hf.models import OWN_VALUES, PLACEMENTS, SIZES, VARIANTS, build, some_ids
from tests.plain_model import from_transformers, plain_logits


def test_phases_are_taken_in_float32():
    """Seen in the gradient, -sin(p) dy, which is rounded to bf16 once. The values cannot tell: on a CPU
    torch computes the cos of a bf16 tensor in float32 anyway."""
    fan = FANActivation(FANformerConfig(**SIZES), width=32, p_ratio=0.25)
    y = (20 * torch.randn(64, 24)).to(torch.bfloat16).requires_grad_()
    dy = torch.randn(64, 8).to(torch.bfloat16)
    fan(y)[:, :8].backward(dy)
    assert torch.equal(y.grad[:, :8], (-y[:, :8].float().sin() * dy.float()).to(torch.bfloat16))


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


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_the_embedding_and_stored_once(tied, tmp_path):
    model = build(tie_word_embeddings=tied)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    model.save_pretrained(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) is not tied


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


# -- every variant against the equations


FLOAT32_LOGITS = 2e-5  # logits of float32 against float64, 3 layers, logits of order 1


@pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())
@torch.no_grad()
def test_logits_are_those_of_the_equations(fields):
    model, ids = build(alpha=0.1, **fields), some_ids(2, 24)  # norms and biases are off their initial values
    gelu = model.config.fan_activation == "gelu"
    exact = {name: weight.double() for name, weight in from_transformers(model.state_dict()).items()}
    expected = plain_logits(exact, ids, heads=4, gelu=gelu)
    assert (model(ids).logits - expected).abs().max() < FLOAT32_LOGITS


def test_values_of_their_own_fan_have_no_matrix_behind_it():
    shapes = {name: tuple(w.shape) for name, w in build(**OWN_VALUES).model.layers[0].self_attn.named_parameters()}
    fan = {"fan.weight": (24, 32), "fan.bias": (24,), "v_fan.weight": (14, 32), "v_fan.bias": (14,)}  # of 16: P 2, G 12
    assert shapes == fan | {"q_proj.weight": (32, 32), "k_proj.weight": (16, 32), "o_proj.weight": (32, 32)}


@pytest.mark.parametrize("fields", PLACEMENTS.values(), ids=PLACEMENTS.keys())
def test_every_weight_has_a_gradient(fields):
    model = build(**fields).train()
    model(some_ids(), labels=some_ids()).loss.backward()
    assert [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()] == []


# -- saving, and versions of transformers


@pytest.mark.parametrize("installed", ["4.57.6", "5.3.0.dev0"])
def test_an_older_transformers_is_told_which_one_it_needs(installed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first file of an export that is read, before it uses anything that is new."""
    monkeypatch.setattr(sys.modules["transformers"], "__version__", installed)  # which it may have put there itself
    needed = f"needs transformers {configuration_fanformer.OLDEST_TRANSFORMERS} or later, and {installed} is installed"
    with pytest.raises(ImportError, match=re.escape(needed)):
        runpy.run_path(configuration_fanformer.__file__)
