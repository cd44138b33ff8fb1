"""transformers' own tests of every model, run on ours.

They are in transformers' sources and not in its wheel: TRANSFORMERS_SOURCE names a checkout, or an unpacked source
distribution, of the installed version. A source distribution lacks their tests of generation and of export, which are
left out then. Without the variable, or the package `parameterized` that they need, all of this is skipped.
"""

import importlib
import os
import sys
import types
import unittest
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from transformers.models.auto import modeling_auto

from megatron_fanformer.hf import FANformerConfig, FANformerForCausalLM, FANformerModel
from megatron_fanformer.hf.modeling_fanformer import FANformerRotaryEmbedding

SOURCE = os.environ.get("TRANSFORMERS_SOURCE")
IN_CHECKOUTS_ALONE = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}

if SOURCE is None:
    pytest.skip("TRANSFORMERS_SOURCE names no transformers sources", allow_module_level=True)
pytest.importorskip("parameterized")


def their_tests(folder: Path) -> Any:
    """Their module of common tests; `folder` is imported under another name, since `tests` is this project's."""
    package = sys.modules["transformers_tests"] = types.ModuleType("transformers_tests")
    package.__path__ = [str(folder)]
    for name, mixin in IN_CHECKOUTS_ALONE.items():
        if not (folder / f"{name.replace('.', '/')}.py").is_file():
            stand_in = sys.modules[f"transformers_tests.{name}"] = types.ModuleType(name)
            setattr(stand_in, mixin, type(mixin, (), {}))
            sys.modules[f"transformers_tests.{name.split('.')[0]}"] = types.ModuleType(name)
    return importlib.import_module("transformers_tests.test_modeling_common")


common = their_tests(Path(SOURCE) / "tests")
training = importlib.import_module("transformers_tests.test_training_mixin")


class ModelTester:
    """What their tests ask of a model: its sizes, a configuration, inputs."""

    base_model_class = FANformerModel
    causal_lm_class = FANformerForCausalLM
    config_class = FANformerConfig
    is_training = True
    batch_size, seq_length = 5, 7
    vocab_size, hidden_size, intermediate_size = 99, 32, 40
    num_hidden_layers, num_attention_heads, num_key_value_heads = 2, 4, 2

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def get_config(self) -> FANformerConfig:
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        sizes = {name: getattr(self, name) for name in (*names, "num_key_value_heads")}
        return FANformerConfig(**sizes, bos_token_id=1, eos_token_id=2, pad_token_id=0, **self.fields)

    def prepare_config_and_inputs_for_common(self) -> tuple[FANformerConfig, dict[str, torch.Tensor]]:
        ids = common.ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.tril(torch.ones_like(ids))}


@pytest.mark.full
class TestFANformer(
    common.ModelTesterMixin, common.GenerationTesterMixin, training.TrainingTesterMixin, unittest.TestCase
):
    """As in the paper, and with grouped queries."""

    all_model_classes = (FANformerModel, FANformerForCausalLM)
    test_can_init_all_missing_weights_before_2023 = True  # the year of a copyright notice, which ours lacks
    model_tester = None
    fields: ClassVar[dict[str, Any]] = {}

    @classmethod
    def setUpClass(cls) -> None:
        """Their tests ask these tables, by a class's name, which inputs it takes."""
        tables = {"MODEL_MAPPING_NAMES": FANformerModel, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": FANformerForCausalLM}
        for table, model in tables.items():
            names = mock.patch.dict(getattr(modeling_auto, table), fanformer=model.__name__)
            names.start()
            cls.addClassCleanup(names.stop)
        # Their test of frequencies reads this of every model; ours computes it from the positions.
        FANformerRotaryEmbedding.inv_freq = property(lambda rope: rope.frequencies(torch.tensor([[99]]))[0])
        cls.addClassCleanup(lambda: delattr(FANformerRotaryEmbedding, "inv_freq"))

    def setUp(self) -> None:
        self.model_tester = ModelTester(**self.fields)


@pytest.mark.full
class TestOwnValues(TestFANformer):
    """Values straight out of FAN, gelu, no bias, untied."""

    fields: ClassVar[dict[str, Any]] = {
        "fan_placement": "qk_and_v",
        "v_p_ratio": 0.125,
        "fan_activation": "gelu",
        "fan_bias": False,
        "tie_word_embeddings": False,
    }
