"""The verb `generate`: text from a checkpoint and from an export, where it stops, and what it refuses."""

import pytest
import torch

from megatron_fanformer.convert.recognition import find_checkpoint
from megatron_fanformer.errors import InputError
from megatron_fanformer.generate.config import GenerateConfig
from megatron_fanformer.generate.generate import generate
from tests.generate.making import PROMPT, write_tokenizer

# What a user of the export runs where this package cannot be imported.


def run_all(folder, *prompts, **settings):
    return generate(GenerateConfig(**{"checkpoint": str(folder), "prompts": prompts, "max_new_tokens": 24, **settings}))


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


def test_text_follows_the_prompt(greedy):
    assert greedy.prompt_ids == [ord(character) for character in PROMPT]
    assert len(greedy.ids) == 24
    assert greedy.text == "".join(map(chr, greedy.ids))


def test_a_checkpoint_its_export_and_a_choice_of_one_token_give_the_same_text(greedy, run_folder, exported_folder):
    assert run(find_checkpoint(run_folder)).ids == greedy.ids
    assert run(exported_folder).ids == greedy.ids
    assert run(run_folder, temperature=2.0, top_k=1).ids == greedy.ids


def test_text_depends_on_the_seed_alone(run_folder, exported_folder):
    first = run(run_folder, temperature=1.0, seed=3).ids
    torch.manual_seed(5)
    assert run(exported_folder, temperature=1.0, seed=3).ids == first
    assert run(run_folder, temperature=1.0, seed=4).ids != first


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
    found = problems_of(
        tmp_path / "nowhere",
        temperature=-1.0,
        top_p=0.0,
        top_k=-1,
        seed=-1,
        max_new_tokens=0,
        batch_size=0,
        num_samples=0,
        prompts=(),
        stop=("",),
        tokenizer=str(tmp_path / "no.model"),
    )
    fields = ("temperature", "top_k", "top_p", "seed", "num_samples")
    texts = ("a stop string", "max_new_tokens", "batch_size", "there is no prompt")
    subjects = (*fields, *texts, str(tmp_path), "tokenizer")
    assert [line for line, subject in zip(found, subjects, strict=True) if not line.startswith(subject)] == []


def test_a_prompt_beyond_the_sequence_length_is_refused(run_folder):
    (problem,) = problems_of(run_folder, prompts=("x", "x" * 130, "xx"))
    assert problem.startswith("prompt 2's 130 tokens")
    assert len(problems_of(run_folder, max_new_tokens=121)) == 1


def test_a_checkpoint_without_a_tokenizer_asks_for_one(run_folder, tmp_path):
    checkpoint = find_checkpoint(run_folder)
    for name in ("metadata.json", "config.yaml"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    (problem,) = problems_of(tmp_path)
    assert problem == f"{tmp_path} holds no tokenizer; name one with --tokenizer"


def test_a_larger_tokenizer_than_the_model_has_ids_is_refused(run_folder, tmp_path):
    (problem,) = problems_of(run_folder, tokenizer=str(write_tokenizer(tmp_path, vocab_size=251)))
    assert "251 ids" in problem
    assert "250" in problem
