"""Exported folders described and verified: transformers' and the authors', whole, in shards, and pickled."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.conftest import REFERENCE
from tests.inspect.conftest import TOKENIZER, Inspect
from tests.inspect.test_dataset import flip, refused
from tests.whole_models import export_huggingface, read_reference, read_weights, reference_to_megatron

CASE = REFERENCE / "fanformer-untied-p0125"


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    config, tensors = read_reference(CASE)
    folder = tmp_path / "export"
    export_huggingface(
        config, reference_to_megatron(tensors, config), folder, dtype=torch.bfloat16, max_shard_size="100KB"
    )
    return folder


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CASE, tmp_path / "reference"))


def test_a_hugging_face_folder_in_shards(inspect: Inspect, exported: Path) -> None:
    output = inspect(exported, "--verify")
    assert (output.code, output.error) == (0, "")
    assert f"{exported}: hf\n" in output.out
    assert " p_ratio 0.125, activation none, bias yes, placement qkv\n" in output.out
    assert "safetensors have no checksum of their bytes" in output.out
    facts = json.loads(inspect(exported, "--json").out)
    assert (facts["kind"], facts["dtype"], facts["tokenizer"]) == ("hf", "bfloat16", None)
    assert len(facts["shards"]) > 2
    assert facts["stored_parameters"] == sum(tensor.numel() for tensor in read_weights(exported).values())


def test_a_tokenizer_and_its_chat_template_are_told(inspect: Inspect, exported: Path) -> None:
    shutil.copy(TOKENIZER, exported / "tokenizer.json")
    (exported / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert json.loads(inspect(exported, "--json").out)["tokenizer"] == "tokenizer.json"
    assert json.loads(inspect(exported, "--json").out)["chat_template"] is True


def test_a_reference_checkpoint(inspect: Inspect, reference: Path) -> None:
    facts = json.loads(inspect(reference, "--verify", "--json").out)
    config, tensors = read_reference(reference)
    assert (facts["kind"], facts["dtype"], facts["tensors"]) == ("reference", "float32", len(tensors))
    assert facts["model"]["parameters"] == config.num_parameters == facts["stored_parameters"]
    assert facts["model"]["fan"]["p_ratio"] == 0.125


def test_a_pickled_reference_checkpoint(inspect: Inspect, reference: Path) -> None:
    weights = safetensors.torch.load_file(reference / "model.safetensors")
    (reference / "model.safetensors").unlink()
    torch.save(weights, reference / "model.pt")
    output = inspect(reference, "--verify")
    assert output.code == 0
    assert "the CRC-32 of their bytes" in output.out
    flip(reference / "model.pt", (reference / "model.pt").stat().st_size // 2)
    refused(inspect(reference, "--verify"), "model.pt is damaged in its weights (CRC-32 of")


def test_a_tensor_that_is_missing_or_of_another_shape(inspect: Inspect, reference: Path) -> None:
    file, name = reference / "model.safetensors", "transformer.blocks.1.ff_out.weight"
    weights = safetensors.torch.load_file(file)
    whole = weights[name]
    weights[name] = whole[:, 1:].contiguous()
    safetensors.torch.save_file(weights, file)
    refused(inspect(reference, "--verify"), f"has {name} of shape ", "where its model has")
    del weights[name]
    safetensors.torch.save_file(weights, file)
    refused(inspect(reference, "--verify"), f"has {name} of shape none")
