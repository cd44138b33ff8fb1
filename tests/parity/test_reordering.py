"""Reordered runs compute the same model: they differ by rounding, and not by nothing."""

from typing import Any

import numpy as np
import pytest

from megatron_fanformer.model.config import FANConfig
from megatron_fanformer.parity.comparison import baseline_of, differences
from megatron_fanformer.parity.trial import TrialConfig, run_trial
from megatron_fanformer.runtime.layout import ParallelConfig
from megatron_fanformer.train.optimizer import OptimizerConfig
from tests.tiny import tiny_model

ROUNDING = 1e-5  # relative; float32 sums of some hundred terms, through four layers and backward
SINGLE = ParallelConfig(use_distributed_optimizer=False)


def trial_of(**fields: Any) -> TrialConfig:
    model = tiny_model(vocab_size=61, make_vocab_size_divisible_by=8, seq_length=32, **fields)
    return TrialConfig(
        model=model,
        optimizer=OptimizerConfig(lr=1e-3),
        global_batch_size=4,
        micro_batch_size=2,
        steps=1,
        dtype="fp32",
        device="cpu",
    )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_query_groups": 2, "untie_embeddings_and_output_weights": True},
        {"fan": FANConfig(placement="qk_and_v", v_p_ratio=0.125)},
        {"fan": FANConfig(placement="none")},
        {"fan": FANConfig(p_ratio=0.0, activation="gelu", bias=False)},
        {"fan": FANConfig(placement="ffn")},
    ],
    ids=["qkv", "grouped-untied", "qk_and_v", "none", "atm", "ffn"],
)
def test_a_reordered_run_differs_by_rounding(run_on_ranks: Any, fields: dict[str, Any]) -> None:
    trial = trial_of(**fields)
    baseline = baseline_of(run_on_ranks(1, run_trial, trial, SINGLE)[0])
    [trace] = run_on_ranks(1, run_trial, trial, SINGLE, 1)
    found = differences(baseline, [trace])
    for kind in ("outputs", "gradients"):
        assert found.tensors[kind].keys() == baseline.tensors[kind].keys()
        assert 0 < max(found.tensors[kind].values()) < ROUNDING


def test_the_order_is_another_one_of_the_same_weights(run_on_ranks: Any) -> None:
    [plain] = run_on_ranks(1, run_trial, trial_of(), SINGLE)
    [reordered] = run_on_ranks(1, run_trial, trial_of(), SINGLE, 1)
    pairs = zip(plain.initial, reordered.initial, strict=False)
    assert any(first.values.shape != second.values.shape for first, second in pairs)  # whole tensors, put back in order
    whole = {part.name: part.values for part in reordered.initial}
    for part in plain.initial:
        np.testing.assert_array_equal(whole[part.name][part.where], part.values)
