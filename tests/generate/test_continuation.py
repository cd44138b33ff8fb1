"""Continuations: sampled tokens, their text, and rows of a batch that read the tokens each has alone."""

import math

import pytest
import torch
from transformers.generation.logits_process import TopPLogitsWarper

from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.errors import DivergenceError
from megatron_fanformer.generate.generate import (
    Continuation,
    NewText,
    continue_together,
    next_token,
    token_probabilities,
)
from megatron_fanformer.generate.verb import SamplingConfig
from megatron_fanformer.runtime.seeding import generator_for
from tests.generate.making import GREEDY, Bytes, new_ids_of_many, with_model, write_checkpoint

PROBABILITIES = torch.tensor([0.05, 0.4, 0.15, 0.3, 0.1])
LOGITS = PROBABILITIES.log() + 3.0


def kept(**settings) -> list[int]:
    probabilities = token_probabilities(LOGITS, SamplingConfig(**{"temperature": 1.0, **settings}))
    assert probabilities.sum().item() == pytest.approx(1.0, abs=1e-12)
    return probabilities.nonzero().flatten().tolist()


def draws(number: int, **settings) -> list[int]:
    config = SamplingConfig(**{"temperature": 1.0, **settings})
    generator = generator_for(config.seed, "")
    return [next_token(LOGITS, config, generator) for _ in range(number)]


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
        next_token(torch.tensor([0.0, value]), SamplingConfig(), generator_for(0, ""))


# -- text

TEXT = "def f(x):\n    return [x, 'é', '中文', '🙂']  # it's\n\nThe  end. \N{SNOWMAN}"


def settled_after_each(text: str, *stop: str) -> list[str]:
    ids = list(text.encode())
    new = NewText(Bytes(), [65], stop)
    found = []
    for count in range(1, len(ids) + 1):
        new.update(ids[:count])
        found.append(new.settled)
    return found


@pytest.mark.parametrize("kind", ["olmo", "sentencepiece"])
def test_the_text_is_what_the_whole_decoded_sequence_adds_to_the_prompt(
    kind, olmo_tokenizer_file, small_tokenizer_file
):
    tokenizer = load_tokenizer(olmo_tokenizer_file if kind == "olmo" else small_tokenizer_file)
    ids = tokenizer.encode(TEXT)
    for cut in range(len(ids)):
        if tokenizer.decode(ids[:cut]) + tokenizer.decode(ids[cut:]) == TEXT:  # not within a character
            new = NewText(tokenizer, ids[:cut])
            new.update(ids[cut:])
            assert new.text == TEXT[len(tokenizer.decode(ids[:cut])) :]


def test_tokens_without_text_have_none():
    new = NewText(Bytes(), [0, 65])
    new.update([66, 299, 67, 0])
    assert new.text == "BC"


def test_text_is_settled_where_its_character_is_whole_and_begins_no_stop_string():
    assert settled_after_each("aé🙂b") == ["a", "a", "aé", "aé", "aé", "aé", "aé🙂", "aé🙂b"]
    assert settled_after_each("a\n\nb\nc", "\n\nQ", "\nclass") == ["a", "a", "a", "a\n\nb", "a\n\nb", "a\n\nb"]


def test_the_first_stop_string_ends_the_text():
    new = NewText(Bytes(), [65], ["END", "x", "\nE"])
    new.update(list(b"one\nEND"))
    assert new.is_stopped
    assert new.text == new.settled == "one"


# -- batches

PROMPTS = [[7, 99, 3, 200, 41], [5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [41, 3], [7, 99, 3, 200, 42], [9, 9, 9]]
NEW_TOKENS = [12, 20, 7, 1, 12, 16]


class FixedModel:
    """Stands in for a model: after `n` tokens of a row, its likeliest next one is `sequences[row][n]`."""

    def __init__(self, *sequences):
        self.sequences, self.seen = [list(sequence) for sequence in sequences], 0

    def decoder(self, batch_size, max_length):
        assert (batch_size, max_length) == (len(self.sequences), max(map(len, self.sequences)))
        return self

    def keep(self, rows):
        self.sequences = [self.sequences[row] for row in rows]

    def next_logits(self, ids_bs):
        last = self.seen + ids_bs.shape[1]
        assert ids_bs.tolist() == [sequence[self.seen : last] for sequence in self.sequences]
        self.seen = last
        following = [[*sequence, 0][last] for sequence in self.sequences]
        return torch.nn.functional.one_hot(torch.tensor(following), 10).float()


def greedy(prompt_ids, max_new_tokens):
    return Continuation(Bytes(eod_id=9), prompt_ids, GREEDY, max_new_tokens=max_new_tokens)


def test_rows_read_their_prompts_and_leave_at_the_end_of_text_or_the_limit():
    sequences = [[1, 2, 3, 9, 5], [1, 2, 3, 4, 5, 6, 7], [8, 7, 6, 5, 4, 3]]
    rows = [greedy([1, 2], 3), greedy([1, 2, 3, 4, 5], 2), greedy([8], 5)]
    continue_together(FixedModel(*sequences), rows)
    assert [row.ids for row in rows] == [[3, 9], [6, 7], [7, 6, 5, 4, 3]]
    assert [row.ended_by for row in rows] == ["end_of_text", "length", "length"]


def ids_by_batch_size(model, sampling):
    return {size: new_ids_of_many(model, PROMPTS, NEW_TOKENS, size, sampling) for size in (1, 2, len(PROMPTS))}


@pytest.mark.parametrize("case", ["fanformer-tied", "fanformer-untied-p0125", "transformer-tied", "grouped-queries"])
def test_a_batch_gives_the_ids_that_each_prompt_has_alone(case, tmp_path, tokenizer_file, run_on_ranks):
    run_on_ranks(1, write_checkpoint, tmp_path, case, tokenizer_file)
    (found,) = run_on_ranks(1, with_model, tmp_path, ids_by_batch_size, GREEDY)
    assert [len(ids) for ids in found[1]] == NEW_TOKENS
    assert found[1] == found[2] == found[len(PROMPTS)]


def test_a_batch_draws_the_ids_that_each_prompt_draws_alone(run_folder, run_on_ranks):
    sampling = SamplingConfig(temperature=1.0, seed=5)
    (found,) = run_on_ranks(1, with_model, run_folder, ids_by_batch_size, sampling)
    assert found[1] == found[2] == found[len(PROMPTS)]
