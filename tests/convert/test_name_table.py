"""The name table: both directions of every pair, and the Hugging Face model against the reference."""

import dataclasses
import re

import pytest
import torch
from safetensors.torch import load_file

from megatron_fanformer.checkpoint.full_tensors import LazyTensors
from megatron_fanformer.convert.huggingface import to_huggingface_config
from megatron_fanformer.convert.name_table import (
    convert,
    expected_shapes,
    inferred_p_ratio,
    names_in,
    rows_of,
)
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.hf import FANformerForCausalLM
from megatron_fanformer.model.config import FANConfig, FANformerConfig
from tests.conftest import REFERENCE
from tests.whole_models import (
    hf_to_megatron,
    logits_bound,
    megatron_to_hf,
    read_reference,
    reference_to_megatron,
)

CASES = ["atl", "fanformer-tied", "fanformer-untied-p0125", "transformer-tied"]
GROUPED = FANformerConfig(
    num_layers=2,
    hidden_size=48,
    ffn_hidden_size=80,
    num_attention_heads=6,
    num_query_groups=2,
    vocab_size=100,
    make_vocab_size_divisible_by=64,
    untie_embeddings_and_output_weights=True,
)
SHAPES = {
    "grouped": GROUPED,
    "one group": dataclasses.replace(GROUPED, num_query_groups=1),
    "tied": dataclasses.replace(GROUPED, untie_embeddings_and_output_weights=False),
    "no bias": dataclasses.replace(GROUPED, fan=FANConfig(bias=False)),
    "transformer": dataclasses.replace(GROUPED, fan=FANConfig(placement="none")),
    "qk and v": dataclasses.replace(GROUPED, fan=FANConfig(placement="qk_and_v", v_p_ratio=0.125)),
}
WITH_REFERENCE = dict(SHAPES)  # for the next one the reference has no names
SHAPES["norms of heads"] = dataclasses.replace(GROUPED, qk_layernorm=True)
SHAPES["FAN layers for the MLP"] = dataclasses.replace(GROUPED, fan=FANConfig(placement="ffn"))


def random_tensors(config, form="megatron"):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in expected_shapes(config, form).items()}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    """A reference case as its whole padded vocabulary, since its logits and its loss span that."""
    folder = REFERENCE / request.param
    config, tensors = read_reference(folder)
    config = dataclasses.replace(config, vocab_size=config.padded_vocab_size)
    return config, tensors, load_file(folder / "expected.safetensors")


@pytest.fixture(scope="module")
def run(case):
    """The case's batch through the Hugging Face model: its output, and its gradients by reference names."""
    config, tensors, expected = case
    model = FANformerForCausalLM(to_huggingface_config(config))
    weights = megatron_to_hf(reference_to_megatron(tensors, config), config)
    tied = [] if config.untie_embeddings_and_output_weights else ["lm_head.weight"]
    assert model.load_state_dict(weights, strict=False).missing_keys == tied
    out = model(expected["input_ids"], labels=expected["labels"], shift_labels=expected["labels"])
    out.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return out, dict(convert(gradients, config, "hf", "reference"))


def test_hugging_face_logits_are_the_references(case, run, request):
    bound = logits_bound(REFERENCE / request.node.callspec.params["case"])
    assert (run[0].logits - case[2]["logits"]).abs().max() < bound


def test_hugging_face_gradients_are_the_references(case, run):
    expected = {name.removeprefix("grad."): g for name, g in case[2].items() if name.startswith("grad.")}
    errors = {name: ((run[1][name] - g).norm() / g.norm()).item() for name, g in expected.items()}
    assert run[1].keys() == expected.keys()
    assert {name: error for name, error in errors.items() if not error < 1e-4} == {}


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_random_weights_from_hugging_face_through_megatron_are_exact(config):
    tensors = random_tensors(config, "hf")
    back = megatron_to_hf(hf_to_megatron(tensors, config), config)
    assert back.keys() == tensors.keys()
    assert [name for name in tensors if not torch.equal(back[name], tensors[name])] == []


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())
def test_the_table_has_every_tensor_once(config):
    """By the model of transformers, and by the count of parameters."""
    model = FANformerForCausalLM(to_huggingface_config(config))
    assert expected_shapes(config, "hf") == {n: tuple(p.shape) for n, p in model.named_parameters()}
    sizes = [torch.Size(shape).numel() for shape in expected_shapes(config, "megatron").values()]
    assert sum(sizes) == config.num_parameters
    for form in ("megatron", "hf", *(("reference",) if config in WITH_REFERENCE.values() else ())):
        names = [name for row, layer in rows_of(config) for name in names_in(row, layer, form)]
        assert len(names) == len(set(names)) == len(expected_shapes(config, form))


def test_every_row_of_a_model_is_made_once_and_only_when_it_is_asked_for():
    asked = []
    tensors = LazyTensors(random_tensors(GROUPED), lambda name: asked.append(name) or random_tensors(GROUPED)[name])
    made = convert(tensors, GROUPED, "megatron", "hf")
    assert asked == []
    assert list(made) == list(expected_shapes(GROUPED, "hf"))
    dict(made)
    assert asked == list(tensors)


def test_vocabulary_padding_is_trimmed_and_comes_back_as_zeros():
    tensors = random_tensors(GROUPED)
    trimmed = megatron_to_hf(tensors, GROUPED)["lm_head.weight"]
    restored = hf_to_megatron(megatron_to_hf(tensors, GROUPED), GROUPED)["output_layer.weight"]
    assert torch.equal(trimmed, tensors["output_layer.weight"][:100])
    assert restored.shape == (128, 48) and not restored[100:].any()


@pytest.mark.parametrize(
    ("form", "name", "size", "message"),
    [
        ("megatron", "decoder.layers.1.mlp.linear_fc2.weight", None, "missing: {}"),
        ("hf", "model.layers.0.self_attn.q_proj.bias", 48, "unknown: {}"),
        ("megatron", "decoder.final_layernorm.weight", 47, "{} ([47] instead of [48])"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(form, name, size, message):
    tensors = random_tensors(GROUPED, form)
    tensors.pop(name, None)
    with pytest.raises(CorruptError, match=re.escape(message.format(name))):
        convert(tensors if size is None else tensors | {name: torch.ones(size)}, GROUPED, form, "reference")


def test_every_tensor_keeps_its_own_type():
    """As in checkpoints of mixed types, whose norms are in float32 among weights in bf16."""
    shapes = expected_shapes(GROUPED, "megatron")
    types = {name: torch.float32 if "norm" in name else torch.bfloat16 for name in shapes}
    tensors = {name: torch.zeros(shapes[name], dtype=types[name]) for name in shapes}
    converted = convert(tensors, GROUPED, "megatron", "hf")
    for name, meta in converted.meta.items():
        assert converted[name].dtype == meta.dtype == (torch.float32 if "norm" in name else torch.bfloat16), name


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
    for rows in (31, 65):
        with pytest.raises(CorruptError, match="it must have 32 to 64"):
            inferred_p_ratio(rows, 64, None)
