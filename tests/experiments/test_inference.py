"""Prefill and decoding: what is timed is the greedy continuation, and its memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_fanformer.experiments import inference
from megatron_fanformer.experiments.probe import InferenceSettings
from megatron_fanformer.experiments.twins import SAME_SIZE, fresh_model, twins
from tests.tiny import tiny_model

TINY = InferenceSettings(
    num_layers=2, hidden_size=32, num_heads=4, vocab_size=100, prompt_tokens=8, new_tokens=4, rounds=3
)


def test_all_three_take_every_turn():
    measured = inference.measure(TINY, Path(), lambda _: None)
    assert [row[0] for row in measured.tables[0].rows] == list(twins(tiny_model()))
    assert len(measured.findings) == 5 and all(finding.ours > 0 for finding in measured.findings)
    none, fan, _ = ([row[place] for place in (4, 5, 6)] for row in measured.tables[0].rows)  # weights, cache, peak
    assert none[0] + none[1] < none[2] < 2 * none[0], "weights count once"
    assert fan[2] - none[2] == pytest.approx(fan[0] - none[0], rel=0.2)


def test_several_sequences_have_a_cache_each():
    one, three = (
        [
            row[5]
            for row in inference.measure(replace(TINY, batch_size=n, rounds=1), Path(), lambda _: None).tables[0].rows
        ]
        for n in (1, 3)
    )
    assert three == pytest.approx([3 * each for each in one])


def test_what_is_timed_is_the_models_own_greedy_continuation(monkeypatch):
    model = fresh_model(twins(tiny_model())[SAME_SIZE], 0).eval()
    prompt = torch.tensor([[3, 14, 15, 92]])
    given = []
    real = inference._next_token
    monkeypatch.setattr(inference, "_next_token", lambda m, ids, cache: given.append(real(m, ids, cache)) or given[-1])
    prefill, decode = inference.continuation_seconds(model, prompt, 5)
    expected = model.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.cat(given, dim=1).tolist() == expected[:, 4:].tolist()
    assert prefill > 0 and decode > 0
