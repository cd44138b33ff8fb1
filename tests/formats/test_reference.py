"""Reading and writing the authors' checkpoint folders."""

import dataclasses
import json
import shutil
from operator import attrgetter

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.formats.name_table import expected_shapes
from megatron_fanformer.formats.recognition import recognise
from megatron_fanformer.formats.reference import optimizer_files
from megatron_fanformer.model.config import FANConfig, FANformerConfig
from tests.conftest import REFERENCE
from tests.tiny import tiny_model
from tests.whole_models import read_reference, write_reference

TIED = REFERENCE / "fanformer-tied"
SMALL = tiny_model(num_layers=1, num_query_groups=2)


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
    ("case", "p_ratio"), [("atl", 0.0), ("fanformer-tied", 0.25), ("fanformer-untied-p0125", 0.125)]
)
def test_p_ratio_comes_from_the_weights_where_it_is_not_stated(case, p_ratio, tmp_path):
    assert read_reference(edited(tmp_path, case, drop=("p_ratio",)))[0].fan == FANConfig(p_ratio=p_ratio)


def test_without_use_atf_there_is_no_fan():
    assert read_reference(REFERENCE / "transformer-tied")[0].fan.placement == "none"


def test_a_missing_fan_bias_is_seen(tmp_path):
    folder = edited(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.endswith(".bias")}, folder / "model.safetensors")
    assert not read_reference(folder)[0].fan.bias


@pytest.mark.parametrize(
    ("field", "value", "read", "expected"),
    [
        ("attention_activation", "gelu", "fan.activation", "gelu"),
        ("n_kv_heads", 2, "query_groups", 2),
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


def test_pickled_weights_are_read(tmp_path):
    folder = edited(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    torch.save(tensors, folder / "model.pt")
    (folder / "model.safetensors").unlink()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read_reference(folder)[1].items())


def test_the_hugging_face_wrap_is_the_same_model(tmp_path):
    config, tensors = read_reference(TIED)
    fields = yaml.safe_load((TIED / "config.yaml").read_text())["model"]
    (tmp_path / "config.json").write_text(json.dumps(fields | {"model_type": "hf_olmo"}))
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    wrapped_config, wrapped = read_reference(tmp_path)
    assert wrapped_config == config
    assert wrapped.keys() == tensors.keys()


@pytest.mark.parametrize(
    "config",
    [
        read_reference(TIED)[0],
        FANformerConfig(
            num_layers=1,
            hidden_size=48,
            ffn_hidden_size=80,
            num_attention_heads=6,
            num_query_groups=2,
            vocab_size=100,
            rotary_base=500_000,
            untie_embeddings_and_output_weights=True,
            fan=FANConfig(p_ratio=0.157, activation="gelu", bias=False),
        ),
    ],
)
def test_a_written_folder_reads_back_as_it_was(config, tmp_path):
    tensors = {n: torch.randn(shape) for n, shape in expected_shapes(config, "reference").items()}
    write_reference(tmp_path / "out", config, tensors, end_of_text_id=7)
    read_config, read = read_reference(tmp_path / "out")
    assert read_config == config
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in read.items())


def test_the_second_block_type_is_placement_qk_and_v(tmp_path):
    config = dataclasses.replace(SMALL, fan=FANConfig(p_ratio=0.25, placement="qk_and_v", v_p_ratio=0.125))
    tensors = {n: torch.randn(shape) for n, shape in expected_shapes(config, "reference").items()}
    write_reference(tmp_path / "out", config, tensors)
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["model"]["block_type"] == "fanformer"
    assert read_reference(tmp_path / "out")[0] == config


def test_the_optimizers_files_are_found(tmp_path):
    folder = edited(tmp_path)
    (folder / "optim.pt").touch()
    assert optimizer_files(folder) == ["optim.pt"]


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
    ("fields", "message"),
    [
        ({"drop": ("layer_norm_type",)}, "layer_norm_type is 'default' and must be 'rms'"),  # the reference's default
        ({"alibi": True, "include_bias": True}, r"alibi is True.*include_bias is True"),
        ({"mlp_hidden_size": 255}, "mlp_hidden_size is 255"),
        ({"embedding_size": 240}, "embedding_size is 240"),
        ({"n_kv_heads": 2, "multi_query_attention": True}, "contradicts"),
        ({"rope_theta": 10000.5}, "must be a whole number"),
        ({"n_heads": 5}, "not a multiple of"),
    ],
)
def test_impossible_models_are_refused(fields, message, tmp_path):
    with pytest.raises(InputError, match=message):
        read_reference(edited(tmp_path, **fields))


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


def test_broken_weights_are_corrupt(tmp_path):
    folder = edited(tmp_path)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(CorruptError, match="cannot be read"):
        read_reference(folder)


def test_a_folder_without_weights_is_refused(tmp_path):
    folder = edited(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="holds no weights"):
        read_reference(folder)


def test_a_folder_of_something_else_is_refused(tmp_path):
    with pytest.raises(InputError, match="is not a reference checkpoint"):
        read_reference(tmp_path)


def test_reference_folders_are_recognised(tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model": {"hidden_size": 64}}))
    assert recognise(TIED).kind == "reference"
    for other in (tmp_path, REFERENCE):
        with pytest.raises(InputError, match="of unknown kind"):
            recognise(other)
