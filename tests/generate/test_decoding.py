"""Batches of prompts of different lengths: each row's tokens are those that it has alone."""

import pytest
import torch

from megatron_fanformer.generate.config import SamplingConfig
from megatron_fanformer.generate.continuation import Continuation, continue_together
from tests.generate.making import GREEDY, Bytes, new_ids_of_many, with_model, write_checkpoint

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
