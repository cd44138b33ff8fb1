"""Reading and writing the authors' checkpoint folders."""

import json
import shutil
from operator import attrgetter

import pytest
import yaml
from safetensors.torch import save_file

from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.model.config import FANConfig, FANformerConfig
from tests.conftest import REFERENCE
from tests.whole_models import read_reference

TIED = REFERENCE / "fanformer-tied"


def edited(tmp_path, case="fanformer-tied", drop=(), **fields):
    """A copy of a case whose configuration has other fields."""
    folder = tmp_path / "edited"
    folder.mkdir()
    shutil.copyfile(REFERENCE / case / "model.safetensors", folder / "model.safetensors")
    model = yaml.safe_load((REFERENCE / case / "config.yaml").read_text())["model"] | fields
    model = {name: value for name, value in model.items() if name not in drop}
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": model}))
    return folder


def test_the_configuration_is_read():
    assert read_reference(REFERENCE / "fanformer-untied-p0125")[0] == FANformerConfig(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        vocab_size=250,
        make_vocab_size_divisible_by=128,
        seq_length=128,
        untie_embeddings_and_output_weights=True,
        fan=FANConfig(p_ratio=0.125),
    )


@pytest.mark.parametrize(
    ("field", "value", "read", "expected"),
    [
        ("n_kv_heads", None, "query_groups", 4),
        ("multi_query_attention", True, "query_groups", 1),
        ("embedding_size", 256, "padded_vocab_size", 256),
        ("embedding_size", 252, "padded_vocab_size", 252),
        ("embedding_size", None, "padded_vocab_size", 250),
        ("layer_norm_eps", "1e-5", "layernorm_epsilon", 1e-5),  # as YAML 1.1 reads it
    ],
)
def test_fields_are_read(field, value, read, expected, tmp_path):
    drop = ("multi_query_attention",) if field == "n_kv_heads" else ()
    config, _ = read_reference(edited(tmp_path, drop=drop, **{field: value}))
    assert attrgetter(read)(config) == expected


def test_the_hugging_face_wrap_is_the_same_model(tmp_path):
    config, tensors = read_reference(TIED)
    fields = yaml.safe_load((TIED / "config.yaml").read_text())["model"]
    (tmp_path / "config.json").write_text(json.dumps(fields | {"model_type": "hf_olmo"}))
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    wrapped_config, wrapped = read_reference(tmp_path)
    assert wrapped_config == config
    assert wrapped.keys() == tensors.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alibi", True),
        ("rope", False),
        ("layer_norm_type", "default"),
        ("include_bias", True),
        ("bias_for_layer_norm", True),
        ("activation_type", "gelu"),
        ("attention_layer_norm", True),
        ("norm_after", True),
        ("clip_qkv", 8.0),
        ("scale_logits", True),
        ("block_type", "llama"),
        ("attention_activation", "relu"),
    ],
)
def test_what_the_model_cannot_express_is_refused(name, value, tmp_path):
    with pytest.raises(InputError, match=f"{name} is {value!r}"):
        read_reference(edited(tmp_path, **{name: value}))


@pytest.mark.parametrize(
    ("case", "fields", "missing"),
    [
        ("transformer-tied", {"use_ATF": True}, ""),
        ("fanformer-tied", {"block_type": "fanformer"}, r"\.blocks\.0\.v_fan"),
    ],
)
def test_weights_without_the_fan_that_is_stated_are_corrupt(case, fields, missing, tmp_path):
    with pytest.raises(CorruptError, match=f"the weights have no transformer{missing}"):
        read_reference(edited(tmp_path, case, **fields))
