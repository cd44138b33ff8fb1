"""Sampling: what each setting cuts off, and that draws depend on the seed alone."""

import math

import pytest
import torch
from transformers.generation.logits_process import TopPLogitsWarper

from megatron_fanformer.errors import DivergenceError
from megatron_fanformer.generate.config import SamplingConfig
from megatron_fanformer.generate.sampling import Sampler, token_probabilities

PROBABILITIES = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1])
LOGITS = PROBABILITIES.log() + 3.0


def kept(**settings) -> list[int]:
    probabilities = token_probabilities(LOGITS, SamplingConfig(**{"temperature": 1.0, **settings}))
    assert probabilities.sum().item() == pytest.approx(1.0, abs=1e-12)
    return probabilities.nonzero().flatten().tolist()


def draws(number: int, **settings) -> list[int]:
    sampler = Sampler(SamplingConfig(**{"temperature": 1.0, **settings}))
    return [sampler(LOGITS) for _ in range(number)]


def test_temperature_divides_the_logits():
    found = token_probabilities(LOGITS, SamplingConfig(temperature=0.5))
    squared = PROBABILITIES.double() ** 2
    assert torch.allclose(found, squared / squared.sum(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (1e-3, 0), (1e-30, 0), (5e-324, 0), (5.0, 1)])
def test_low_temperatures_and_one_token_to_choose_from_take_the_likeliest(temperature, top_k):
    assert draws(20, temperature=temperature, top_k=top_k) == [1] * 20


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        *(({"top_k": top_k}, ids) for top_k, ids in ((0, [0, 1, 2, 3, 4]), (2, [1, 3]), (3, [1, 2, 3]))),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        *(({"top_p": top_p}, ids) for top_p, ids in ((1e-9, [1]), (0.39, [1]), (0.5, [1, 3]), (0.71, [1, 2, 3]))),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 2, "top_p": 0.57}, [1]),  # 0.4 of the 0.7 that two tokens have
        ({"top_k": 2, "top_p": 0.58}, [1, 3]),
    ],
)
def test_top_k_keeps_the_likeliest_and_top_p_the_fewest_of_that_mass_and_at_least_one(settings, ids):
    assert kept(**settings) == ids


@pytest.mark.parametrize(("top_p", "tokens"), [(0.25, 1), (0.5, 2), (math.nextafter(0.5, 1), 3), (0.75, 3), (1.0, 4)])
def test_top_p_that_is_the_mass_of_some_tokens_keeps_no_more(top_p, tokens):
    """Of four equal ones the first, as many as transformers keeps."""
    found = token_probabilities(torch.zeros(4), SamplingConfig(temperature=1.0, top_p=top_p))
    assert found.tolist() == [1 / tokens] * tokens + [0.0] * (4 - tokens)
    theirs = TopPLogitsWarper(top_p)(None, torch.zeros(1, 4, dtype=torch.float64))
    assert int(theirs.isfinite().sum()) == tokens


def test_draws_follow_the_probabilities():
    counts = torch.bincount(torch.tensor(draws(4000)), minlength=5) / 4000
    assert torch.allclose(counts, PROBABILITIES, atol=0.03)  # four standard deviations


def test_equal_seeds_alone_draw_alike_and_leave_the_global_state_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = draws(50, seed=7)
    torch.manual_seed(2)
    assert draws(50, seed=7) == first
    torch.manual_seed(1)
    draws(50, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    assert draws(50, seed=8) != first


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(value):
    with pytest.raises(DivergenceError, match="earlier checkpoint"):
        Sampler(SamplingConfig())(torch.tensor([0.0, value]))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_impossible_settings_are_problems(settings, name):
    (problem,) = SamplingConfig(**settings).problems()
    assert problem.startswith(name)
