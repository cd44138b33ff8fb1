"""Whole models in memory, for tests: read, converted and written at once, where the package goes tensor by tensor."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_fanformer.checkpoint import megatron_versions
from megatron_fanformer.checkpoint.full_tensors import open_full_tensors
from megatron_fanformer.convert import huggingface, reference
from megatron_fanformer.convert.model_card import Extras
from megatron_fanformer.convert.name_table import convert
from megatron_fanformer.convert.weight_files import open_weights
from megatron_fanformer.durable_files import new_folder
from megatron_fanformer.model.config import FANformerConfig
from tests.plain_model import plain_logits

Tensors = dict[str, Tensor]

SAME_LOGITS = 2e-5
"""Absolute, of float32 against the authors' float32, unless theirs are further from float64's."""
TOKEN_LOSS = 2e-5
"""Absolute, of each token; up to 7.7e-6 was measured, in all layouts, on AVX2 and on AVX-512."""


def logits_bound(case: Path) -> float:
    """Return how far logits may lie from a reference case's: as far as those lie from float64's, 5e-6 to 6e-5.

    Another order of sums is rounded in another way: of the CPU's product library, or of tensor parallel shards.
    """
    weights, expected = load_file(case / "model.safetensors"), load_file(case / "expected.safetensors")
    exact = plain_logits({name: w.double() for name, w in weights.items()}, expected["input_ids"], heads=4)
    return max(SAME_LOGITS, float((expected["logits"] - exact).abs().max()))


def read_full_tensors(checkpoint: Path) -> Tensors:
    return dict(open_full_tensors(checkpoint))


def read_weights(folder: Path) -> Tensors:
    return dict(open_weights(folder))


def read_reference(folder: Path) -> tuple[FANformerConfig, Tensors]:
    config, tensors = reference.open_reference(folder)
    return config, dict(tensors)


def read_huggingface(folder: Path) -> tuple[FANformerConfig, Tensors]:
    config, tensors = huggingface.open_huggingface(folder)
    return config, dict(tensors)


def reference_to_megatron(tensors: Tensors, config: FANformerConfig) -> Tensors:
    return dict(convert(tensors, config, "reference", "megatron"))


def megatron_to_reference(tensors: Tensors, config: FANformerConfig) -> Tensors:
    return dict(convert(tensors, config, "megatron", "reference"))


def megatron_to_hf(tensors: Tensors, config: FANformerConfig) -> Tensors:
    return dict(convert(tensors, config, "megatron", "hf"))


def hf_to_megatron(tensors: Tensors, config: FANformerConfig) -> Tensors:
    return dict(convert(tensors, config, "hf", "megatron"))


def export_huggingface(
    config: FANformerConfig, tensors: Tensors, destination: Path, *, dtype: torch.dtype, **extras: Any
) -> None:
    """Write a new folder; `extras` are the fields of `Extras`, but for the name."""
    with new_folder(destination) as folder:
        converted = convert(tensors, config, "megatron", "hf", dtype=dtype)
        huggingface.write_huggingface(folder, config, converted, Extras(name=destination.name, **extras))


def save_state(sharded_state: dict[str, Any], folder: Path) -> None:
    """Write a sharded state dict into an empty folder; every rank calls it."""
    strategy = megatron_versions.save_strategy(None)
    megatron_versions.prepare_save(sharded_state, folder, strategy, validate=True).execute_sync()
