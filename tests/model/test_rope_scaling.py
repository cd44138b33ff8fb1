"""Scaled rotary positions against transformers' own formulas: frequencies, whole models on long rows, their caches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_fanformer.convert.convert import convert_checkpoint
from megatron_fanformer.convert.huggingface import open_huggingface
from megatron_fanformer.convert.name_table import expected_shapes
from megatron_fanformer.generate.models import build_model, find_model
from megatron_fanformer.hf import FANformerForCausalLM
from megatron_fanformer.model.config import FANformerConfig
from megatron_fanformer.model.rope_scaling import RopeScalingConfig
from megatron_fanformer.runtime.parallel import ParallelConfig, rank_grid
from megatron_fanformer.runtime.seeding import seed_everything
from tests.small_runs import RunOnRanks
from tests.tiny import tiny_model
from tests.whole_models import export_huggingface

ORIGINAL, LENGTH = 32, 256
SCALINGS: dict[str, dict[str, Any]] = {
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL, "beta_fast": 4.0},
    "yarn by mscale": {
        **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": ORIGINAL, "truncate": False},
        **{"mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 3.0, "beta_slow": 0.5},
    },
    "yarn by its factor": {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
    },
    "linear": {"rope_type": "linear", "factor": 3.0},
}
SAME_LOGITS = 2e-6
"""Of the largest logit: the attention factor is in the softmax's scale here, in cos and sin there (6e-7 measured)."""


@pytest.mark.parametrize("size", [8, 64, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_factor_are_transformers_to_the_bit(name: str, size: int) -> None:
    stated = SCALINGS[name]
    scaling = RopeScalingConfig(**stated)
    like = LlamaConfig(
        hidden_size=size,
        num_attention_heads=1,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": 10_000.0, **stated},
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[stated["rope_type"]](like, torch.device("cpu"))
    assert torch.equal(scaling.frequencies(10_000, size), frequencies)
    assert scaling.cos_and_sin_factor == factor


def model_of(name: str) -> FANformerConfig:
    return tiny_model(seq_length=LENGTH, num_query_groups=2, rope_scaling=RopeScalingConfig(**SCALINGS[name]))


def logits_of(checkpoint: Path, ids: list[list[int]], read_first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [b, s, v] of a whole pass, and those [b, s - read_first, v] of a cache that reads on token by token."""
    with rank_grid(ParallelConfig(), "cpu") as grid:
        seed_everything(0)
        model = build_model(find_model(checkpoint), grid)
        ids_bs = torch.tensor(ids)
        decoder = model.decoder(*ids_bs.shape)
        parts = ids_bs.split([read_first, *[1] * (ids_bs.shape[1] - read_first)], dim=1)
        return model.logits(ids_bs), torch.stack([decoder.next_logits(part) for part in parts], dim=1)


@pytest.mark.parametrize("name", SCALINGS)
def test_logits_of_long_rows_are_transformers_and_so_are_the_caches(
    name: str, tmp_path: Path, run_on_ranks: RunOnRanks
) -> None:
    model, generator = model_of(name), torch.Generator().manual_seed(0)
    shapes = expected_shapes(model, "megatron").items()
    tensors = {key: torch.randn(shape, generator=generator) * 0.3 for key, shape in shapes}
    export_huggingface(model, tensors, tmp_path / "hf", dtype=torch.float32)
    convert_checkpoint(tmp_path / "hf", tmp_path / "run", to="megatron")
    assert open_huggingface(tmp_path / "hf")[0].rope_scaling == find_model(tmp_path / "run").config.rope_scaling
    ids = torch.randint(model.vocab_size, (2, LENGTH), generator=generator)
    with torch.no_grad():
        expected = FANformerForCausalLM.from_pretrained(tmp_path / "hf")(ids).logits
        plain = {"rope_type": "default", "rope_theta": 10_000.0}
        unscaled = FANformerForCausalLM.from_pretrained(tmp_path / "hf", rope_parameters=plain)(ids).logits
    ((whole, cached),) = run_on_ranks(1, logits_of, tmp_path / "run", ids.tolist(), LENGTH - 3)
    largest = expected.abs().max()
    assert (whole - expected).abs().max() <= SAME_LOGITS * largest
    assert (cached - expected[:, -4:]).abs().max() <= SAME_LOGITS * largest
    assert (unscaled - expected)[:, ORIGINAL:].abs().max() > 0.01 * largest  # else none of this would show anything


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"factor": 4.0}, "model.rope_scaling.factor is 4.0, but rope_type default has no use for it"),
        ({"rope_type": "linear"}, "model.rope_scaling.factor is missing, which rope_type linear needs; state it"),
        ({"rope_type": "linear", "factor": 2.0, "beta_slow": 2.0}, "beta_slow is 2.0, but rope_type linear has no use"),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_position_embeddings is missing, which rope_type yarn"),
        ({**SCALINGS["yarn"], "beta_slow": 5.0}, "model.rope_scaling.beta_fast is 4.0; it must be above beta_slow"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    (line,) = tiny_model(rope_scaling=RopeScalingConfig(**fields)).problems()
    assert message in line
