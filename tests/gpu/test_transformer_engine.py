"""The Transformer Engine layers against the local ones, on a GPU; skipped where there is none."""

import dataclasses
from typing import Any

import pytest
import torch

from megatron_fanformer.checkpoint.training_state import model_state
from megatron_fanformer.model.build import build_stages
from megatron_fanformer.model.config import FANConfig, FANformerConfig
from megatron_fanformer.model.layer_spec import transformer_engine_problem
from megatron_fanformer.runtime.parallel import ParallelConfig, distributed
from megatron_fanformer.runtime.seeding import seed_everything

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

CONFIG = FANformerConfig(
    num_layers=2, hidden_size=256, ffn_hidden_size=512, num_attention_heads=4, vocab_size=512, seq_length=128
)
BF16_LOGITS = 0.05  # absolute, of logits of about 4: two layers' roundings to eight bits


@pytest.fixture(autouse=True)
def _transformer_engine() -> None:
    if problem := transformer_engine_problem():
        pytest.skip(f"Transformer Engine: {problem}")


def run(implementation: str, fan: FANConfig, scale: float = 1.0) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits [1, s, v] and the shapes of all weights by global name; `scale` is put on one input norm."""
    parallel = ParallelConfig(device="cuda", transformer_impl=implementation)
    with distributed(parallel) as grid:
        seed_everything(0)
        config = dataclasses.replace(CONFIG, fan=fan)
        (stage,) = build_stages(config, parallel, grid, dtype=torch.bfloat16, seed=3)
        state = model_state([stage], grid)["model0"]
        with torch.no_grad():
            norm = next(value for value in state.values() if value.key.endswith("layers.0.input_layernorm.weight"))
            norm.data.mul_(scale)
            tokens = torch.arange(128, device="cuda").unsqueeze(0)
            logits = stage(tokens, tokens, None).float().cpu()
        return logits, {value.key: tuple(value.data.shape) for value in state.values()}


@pytest.mark.parametrize("fan", [FANConfig(), FANConfig(p_ratio=0.125, bias=False), FANConfig(placement="none")])
def test_same_model_as_the_local_layers(fan: FANConfig) -> None:
    logits, shapes = run("transformer_engine", fan)
    local_logits, local_shapes = run("local", fan)
    assert shapes == local_shapes
    torch.testing.assert_close(logits, local_logits, atol=BF16_LOGITS, rtol=0)


@pytest.mark.parametrize("fan", [FANConfig(), FANConfig(placement="none")])
def test_scaling_an_input_norm_changes_the_output(fan: FANConfig) -> None:
    plain, _ = run("transformer_engine", fan)
    scaled, _ = run("transformer_engine", fan, scale=1.5)
    assert (plain - scaled).abs().max() > 0.1
