"""The verb `generate`: sampled tokens, their text, rows of a batch, and what is printed and refused."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers.generation.logits_process import TopPLogitsWarper

from megatron_fanformer.cli import main
from megatron_fanformer.convert.recognition import find_checkpoint
from megatron_fanformer.data.tokenizer import load_tokenizer
from megatron_fanformer.errors import DivergenceError, InputError
from megatron_fanformer.generate.generate import (
    Continuation,
    NewText,
    continue_together,
    generate,
    next_token,
    print_generations,
    token_probabilities,
)
from megatron_fanformer.generate.verb import GenerateConfig, SamplingConfig, read_prompts
from megatron_fanformer.runtime.seeding import generator_for
from tests.generate.making import PROMPT, Bytes, new_ids, with_model, write_checkpoint, write_tokenizer

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
        *(({"top_k": top_k}, ids) for top_k, ids in ((0, [0, 1, 2, 3, 4]), (2, [1, 3]), (99, [0, 1, 2, 3, 4]))),
        *(({"top_p": top_p}, ids) for top_p, ids in ((1e-9, [1]), (0.5, [1, 3]), (1.0, [0, 1, 2, 3, 4]))),
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
    state = torch.get_rng_state()
    first = draws(50, seed=7)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert draws(50, seed=7) == first != draws(50, seed=8)


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
        found.append(new.final)
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
    assert new.text == new.final == "one"


# -- batches

PROMPTS_IDS = [[7, 99, 3, 200, 41], [5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [41, 3], [7, 99, 3, 200, 42], [9, 9, 9]]
COUNTS = [12, 20, 7, 1, 12, 16]


class FixedModel:
    """Stands in for a model: after `n` tokens of a row, its likeliest next one is `sequences[row][n]`."""

    def __init__(self, *sequences):
        self.sequences, self.seen = [list(sequence) for sequence in sequences], 0

    def decoder(self, batch_size, max_length):
        assert (batch_size, max_length) == (len(self.sequences), max(map(len, self.sequences)))
        return self

    def keep_rows(self, rows):
        self.sequences = [self.sequences[row] for row in rows]

    def next_logits(self, ids_bs):
        last = self.seen + ids_bs.shape[1]
        assert ids_bs.tolist() == [sequence[self.seen : last] for sequence in self.sequences]
        self.seen = last
        following = [[*sequence, 0][last] for sequence in self.sequences]
        return torch.nn.functional.one_hot(torch.tensor(following), 10).float()


def row(prompt_ids, max_new_tokens):
    return Continuation(Bytes(eod_id=9), prompt_ids, SamplingConfig(), max_new_tokens=max_new_tokens)


def test_rows_read_their_prompts_and_leave_at_the_end_of_text_or_the_limit():
    sequences = [[1, 2, 3, 9, 5], [1, 2, 3, 4, 5, 6, 7], [8, 7, 6, 5, 4, 3]]
    rows = [row([1, 2], 3), row([1, 2, 3, 4, 5], 2), row([8], 5)]
    continue_together(FixedModel(*sequences), rows)
    assert [one.ids for one in rows] == [[3, 9], [6, 7], [7, 6, 5, 4, 3]]
    assert [one.ended_by for one in rows] == ["end_of_text", "length", "length"]


def ids_by_batch_size(model):
    return {size: new_ids(model, PROMPTS_IDS, COUNTS, size) for size in (1, 2, len(PROMPTS_IDS))}


@pytest.mark.parametrize("case", ["fanformer-untied-p0125", "transformer-tied", "grouped-queries"])
def test_a_batch_gives_the_ids_that_each_prompt_has_alone(case, tmp_path, tokenizer_file, run_on_ranks):
    run_on_ranks(1, write_checkpoint, tmp_path, case, tokenizer_file)
    (found,) = run_on_ranks(1, with_model, tmp_path, ids_by_batch_size)
    assert [len(ids) for ids in found[1]] == COUNTS
    assert found[1] == found[2] == found[len(PROMPTS_IDS)]


# -- from a checkpoint and from an export


def run_all(folder, *prompts, **settings):
    config = {"checkpoint": str(folder), "prompts": prompts, "max_new_tokens": 24, **settings}
    return list(generate(GenerateConfig(**config)))


def run(folder, prompt=PROMPT, **settings):
    (generation,) = run_all(folder, prompt, **settings)
    return generation


def problems_of(folder, **settings) -> list[str]:
    with pytest.raises(InputError) as caught:
        run_all(folder, *settings.pop("prompts", (PROMPT,)), **settings)
    return str(caught.value).splitlines()


@pytest.fixture(scope="module")
def greedy(run_folder):
    return run(run_folder)


def test_a_checkpoint_its_export_and_a_choice_of_one_token_give_the_same_text(greedy, run_folder, exported_folder):
    assert run(find_checkpoint(run_folder)).ids == greedy.ids
    assert run(exported_folder).ids == greedy.ids
    assert run(run_folder, temperature=2.0, top_k=1).ids == greedy.ids


def test_an_empty_prompt_starts_a_document(run_folder):
    generation = run(run_folder, prompt="", max_new_tokens=5)
    assert generation.prompt_ids == [0]
    assert len(generation.text) == len([token for token in generation.ids if token])


def test_a_stop_string_ends_the_text_before_it(greedy, run_folder):
    stop = greedy.text[10:12]
    stopped = run(run_folder, stop=("never\N{SNOWMAN}", stop))
    assert stopped.text == greedy.text[: greedy.text.index(stop)]
    assert stopped.ended_by == "stop"
    assert greedy.ended_by == "length"


def test_samples_depend_on_their_number_and_prompt_alone(run_folder):
    prompts = ("a = 1", PROMPT, "import ")
    sampled = {"temperature": 1.0, "seed": 3, "num_samples": 3}
    together = run_all(run_folder, *prompts, batch_size=4, **sampled)
    assert [one.prompt_ids for one in together] == [list(prompt.encode()) for prompt in prompts for _ in range(3)]
    own = [one.text for one in together[3:6]]
    assert [one.text for one in run_all(run_folder, PROMPT, batch_size=1, **sampled)] == own
    assert len(set(own)) == 3


def test_all_problems_are_told_together_on_a_line_each(tmp_path):
    found = problems_of(tmp_path / "nowhere", top_p=0.0, top_k=-1, seed=-1, temperature=-1.0)
    subjects = ("temperature", "top_k", "top_p", "seed")
    assert [line for line, subject in zip(found, subjects, strict=True) if not line.startswith(subject)] == []


def test_a_prompt_beyond_the_sequence_length_is_refused(run_folder):
    (problem,) = problems_of(run_folder, prompts=("x", "x" * 130, "xx"))
    assert problem.startswith("prompt 2's 130 tokens")
    assert len(problems_of(run_folder, max_new_tokens=121)) == 1


def test_a_larger_tokenizer_than_the_model_has_ids_is_refused(run_folder, tmp_path):
    (problem,) = problems_of(run_folder, tokenizer=str(write_tokenizer(tmp_path, vocab_size=251)))
    assert "251 ids, the model's vocabulary 250" in problem


# -- printed


@pytest.mark.parametrize("batch_size", [1, 16])
def test_several_texts_are_printed_in_order_and_a_single_one_alone(run_folder, batch_size, capsys):
    config = GenerateConfig(
        checkpoint=str(run_folder), prompts=("a", "bcd"), temperature=1.0, max_new_tokens=6, batch_size=batch_size
    )
    several = replace(config, num_samples=2)
    texts = [one.text for one in generate(several)]
    print_generations(several)
    heads = [f"--- prompt {prompt}, sample {sample}\n" for prompt in (1, 2) for sample in (1, 2)]
    blocks = zip(heads, ("a", "a", "bcd", "bcd"), texts, strict=True)
    assert capsys.readouterr().out == "\n".join(f"{head}{prompt}{text}\n" for head, prompt, text in blocks)
    print_generations(replace(config, prompts=("a",)))
    assert capsys.readouterr().out == f"a{texts[0]}\n"


def test_prompts_of_the_command_line_and_of_a_file_give_a_line_of_json_each(run_folder, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "two\\nlines"}\n\n{"prompt": "three", "id": 3}\n')
    asked = ["generate", str(run_folder), "--prompt", "one", "--prompts", str(file), "--max-new-tokens", "2"]
    assert main([*asked, "--json", "--stop", "\N{SNOWMAN}"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "two\nlines", "three"]
    assert [(line["sample"], line["ended_by"], len(line["ids"])) for line in lines] == [(0, "length", 2)] * 3


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes("one \r\n\n  {two\nthree\u2028é".encode())
    assert read_prompts(file) == ["one ", "  {two", "three\u2028é"]
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree")
    assert read_prompts(file) == ["one", "two\rthree"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "cannot be read (No such file"),
        ("latin.txt", b"\xe9", "not valid UTF-8"),
        ("half.jsonl", b'{"prompt": "a"}\n{"prompt": "\\ud800"}', "line 2 of prompts"),
    ],
)
def test_files_that_hold_no_prompts_are_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_prompts(tmp_path / name)
    assert message in str(caught.value) and str(tmp_path / name) in str(caught.value)
