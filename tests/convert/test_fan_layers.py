"""FAN layers in place of the MLP through the formats: to Hugging Face and back, and refused by the authors'."""

import dataclasses
from pathlib import Path

import pytest
import torch

from megatron_fanformer.checkpoint.full_tensors import write_full_tensors
from megatron_fanformer.convert.convert import convert_checkpoint
from megatron_fanformer.convert.name_table import expected_shapes
from megatron_fanformer.errors import InputError
from megatron_fanformer.hf import FANformerForCausalLM
from megatron_fanformer.model.config import FANConfig
from megatron_fanformer.runtime.seeding import generator_for
from tests.plain_model import from_transformers, plain_logits
from tests.tiny import tiny_model
from tests.whole_models import read_full_tensors

MODEL = tiny_model(seq_length=32, fan=FANConfig(placement="ffn", activation="gelu"))


def test_to_hugging_face_and_back(tmp_path: Path) -> None:
    """The receipt holds the trainer's logits against the export's, and the plain model both."""
    shapes = expected_shapes(MODEL, "megatron")
    tensors = {name: 0.3 * torch.randn(shape, generator=generator_for(0, name)) for name, shape in shapes.items()}
    write_full_tensors(tmp_path / "run", tensors, {"model": dataclasses.asdict(MODEL)}, {})
    done = convert_checkpoint(tmp_path / "run", tmp_path / "hf", to="hf", padded_vocab_size=MODEL.padded_vocab_size)
    assert done.checks is not None and all(check["passed"] for check in done.checks.values())
    model = FANformerForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.randint(100, (2, 16), generator=torch.Generator().manual_seed(1))
    exact = {name: weight.double() for name, weight in from_transformers(model.state_dict()).items()}
    assert (model(ids).logits - plain_logits(exact, ids, heads=4, gelu=True)).abs().max() < 1e-4
    convert_checkpoint(tmp_path / "hf", tmp_path / "back", to="megatron", verified=False)
    back = read_full_tensors(tmp_path / "back" / "checkpoints" / "step-00000000")
    assert [name for name in tensors if not torch.equal(back[name], tensors[name])] == []
    with pytest.raises(InputError, match="which the authors' format has not; convert it to hf or megatron"):
        convert_checkpoint(tmp_path / "run", tmp_path / "reference", to="reference")
