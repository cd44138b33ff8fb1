"""The model card of an export."""

import dataclasses
from pathlib import Path

import torch

from megatron_fanformer.checkpoint.full_tensors import write_full_tensors
from megatron_fanformer.checkpoint.manifest import write_manifest
from megatron_fanformer.checkpoint.stored_files import COMMON
from megatron_fanformer.convert.convert import convert_checkpoint
from megatron_fanformer.convert.model_card import Extras, model_card
from megatron_fanformer.convert.name_table import expected_shapes
from tests.tiny import tiny_model

MODEL = tiny_model()


def test_the_training_of_a_run_is_told_and_that_of_converted_weights_is_not(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(shape) for name, shape in expected_shapes(MODEL, "megatron").items()}
    step = write_full_tensors(tmp_path / "run", tensors, {"model": dataclasses.asdict(MODEL)}, {})
    convert_checkpoint(tmp_path / "run", tmp_path / "without", to="hf", verified=False)
    assert "Its last run" not in (tmp_path / "without" / "README.md").read_text()
    torch.save({"progress": {"step": 1_500, "consumed_samples": 12_000}}, step / COMMON)
    write_manifest(step, 0)
    convert_checkpoint(step, tmp_path / "with", to="hf", verified=False)
    tokens = 12_000 * MODEL.seq_length
    assert f"Its last run took 1,500 steps, over {tokens:,} tokens." in (tmp_path / "with" / "README.md").read_text()


def test_a_name_is_text_in_the_card_and_a_word_in_its_commands() -> None:
    card = model_card(MODEL, Extras(name="a| <script>b</script> $(c)", tokenizer=Path("t.json")))
    assert r"# a\| \<script\>b\</script\> $(c)" in card.splitlines()
    assert "--model_args 'pretrained=a| <script>b</script> $(c),trust_remote_code=True' --tasks" in card
