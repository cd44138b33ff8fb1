"""Parts of a save on their own: what is not saved, what is summed up, what the settings may be."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_fanformer.checkpoint.config import CheckpointConfig
from megatron_fanformer.checkpoint.optimizer_state import _stored_groups
from megatron_fanformer.checkpoint.saving import check_finite
from megatron_fanformer.checkpoint.training_state import _capture_random_state, _restore_random_state
from megatron_fanformer.errors import DivergenceError


@pytest.mark.parametrize("name", ["save_interval", "keep", "mirror_keep"])
def test_numbers_of_checkpoints_are_at_least_1(name: str) -> None:
    assert CheckpointConfig(**{name: 1}).problems() == []
    assert CheckpointConfig(**{name: 0}).problems() == [f"checkpoint.{name} is 0; it must be at least 1, or null"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_no_value_that_is_not_finite_is_saved(value: float) -> None:
    sound, tensor = torch.ones(4), torch.arange(-3.0, 3.0)
    state = {"a": ShardedTensor.from_rank_offsets("sound", sound), "b": ShardedTensor.from_rank_offsets("w", tensor)}
    check_finite({"model0": state}, 7)
    tensor[2] = value
    with pytest.raises(DivergenceError, match="step 7 was not saved: w has the value"):
        check_finite({"model0": state}, 7)


def test_groups_without_weights_on_this_rank_have_the_common_step() -> None:
    groups = [{"params": [], "lr": 0.1}, {"params": [1], "lr": 0.2, "step": 5}]
    stored = _stored_groups(SimpleNamespace(param_groups=groups))
    assert stored == [{"lr": 0.1, "step": 5}, {"lr": 0.2, "step": 5}]


def draws() -> tuple[float, float, float, float]:
    with get_cuda_rng_tracker().fork("of a test"):
        of_layers = torch.rand(1).item()
    return random.random(), np.random.rand(), torch.rand(1).item(), of_layers


def test_every_generator_goes_on_where_it_was() -> None:
    tracker = get_cuda_rng_tracker()
    before = tracker.get_states(), torch.get_rng_state()
    tracker.add("of a test", 5)
    try:
        draws()
        state = _capture_random_state()
        expected = draws()
        assert draws() != expected
        _restore_random_state(state)
        assert draws() == expected
    finally:
        tracker.set_states(before[0])
        torch.set_rng_state(before[1])
