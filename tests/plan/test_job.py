"""The formula of model FLOPs against the FLOPs that torch counts in a plain model's matrix products."""

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from megatron_fanformer.plan.job import forward_flops_per_token, training_flops_per_token
from tests.conftest import REFERENCE
from tests.plain_model import plain_logits
from tests.whole_models import read_reference

CASES = ("fanformer-tied", "fanformer-untied-p0125", "transformer-tied", "atl")


@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward_equal_the_count(case: str) -> None:
    config, _ = read_reference(REFERENCE / case)
    weights = {n: w.requires_grad_() for n, w in load_file(REFERENCE / case / "model.safetensors").items()}
    tokens = torch.zeros(1, 64, dtype=torch.long)
    with FlopCounterMode(display=False) as forward:
        loss = plain_logits(weights, tokens, heads=4).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    # The plain model multiplies the whole s x s scores; causal attention needs the half.
    masked = 2 * 2 * config.num_layers * config.hidden_size * 64 // 2
    assert forward_flops_per_token(config, 64) == forward.get_total_flops() / 64 - masked
    counted = (forward.get_total_flops() + backward.get_total_flops()) / 64 - 3 * masked
    assert training_flops_per_token(config, 64) == pytest.approx(counted, rel=0.01)
