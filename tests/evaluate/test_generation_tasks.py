"""Tasks whose answers a model writes: right ones count, wrong ones do not; prompts are cut to the model's length."""

import itertools
from decimal import Decimal

import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.code_execution import run_programs
from megatron_fanformer.evaluate.generation_tasks import (
    GenerationSettings,
    evaluate,
    final_number,
    pass_at,
    program,
    write_texts,
)
from megatron_fanformer.evaluate.prepare import documents
from megatron_fanformer.evaluate.results import MetricValue
from tests.evaluate.oe_data import write_library
from tests.evaluate.oracle import Oracle

NAMES = ("gsm8k", "humaneval", "mbpp")
RUN = GenerationSettings(allow_code_execution=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return write_library(tmp_path_factory.mktemp("library"))


def evaluated(tokenizer, name, asked, texts, settings=RUN):
    """The result where the model writes these texts: of each document a list."""
    prompts = {document["prompt"]: written for document, written in zip(asked, texts, strict=True)}
    found = evaluate(Oracle(tokenizer, prompts), tokenizer, name, asked, settings)
    assert [one["doc_id"] for one in found.documents] == [document["doc_id"] for document in asked]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_solutions_count_and_others_do_not(library, tokenizer, name):
    asked = documents(name, library)
    right = evaluated(tokenizer, name, asked, [[document["solution"]] for document in asked])
    assert right.metrics == {right.metric: MetricValue(value=1.0, standard_error=0.0, documents=len(asked))}
    wrong = evaluated(tokenizer, name, asked, [["pass"] for _ in asked])
    assert wrong.metrics[wrong.metric].value == 0.0
    assert {one["score"] for one in wrong.documents} == {0.0}


def test_of_several_samples_those_that_pass_are_counted(library, tokenizer):
    (asked,) = documents("mbpp", library)
    texts = [asked["solution"], "def half(x):\n    return x", asked["solution"], ""] + [""] * 6
    settings = GenerationSettings(allow_code_execution=True, num_samples=10, temperature=0.5)
    found = evaluated(tokenizer, "mbpp", [asked], [texts], settings)
    assert {name: metric.value for name, metric in found.metrics.items()} == {
        "pass@1": pytest.approx(0.2),
        "pass@10": 1.0,
    }
    (judged,) = found.documents
    assert judged["passed"] == 2
    assert judged["score"] == pytest.approx(0.2)
    assert [sample["outcome"] for sample in judged["samples"]] == ["passed", "failed", "passed"] + ["failed"] * 7
    assert judged["samples"][1]["message"].startswith("AssertionError")


@pytest.mark.parametrize(("samples", "passed"), itertools.product([1, 4, 5], [0, 1, 2, 4]))
def test_pass_at_k_is_the_share_of_choices_that_hold_a_passing_text(samples, passed):
    passed = min(passed, samples)
    for k in range(1, samples + 1):
        chosen = list(itertools.combinations(range(samples), k))
        share = sum(min(choice) < passed for choice in chosen) / len(chosen)
        assert pass_at(k, samples, passed) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("So the answer is 18.", "18"),
        ("that is $1,234,567.50 in all", "1234567.50"),
        ("from 20-5", "5"),
        ("it is -5.", "-5"),
        ("it is - 5.", "-5"),
        ("20 - 5", "5"),
        ("1 + 2 = 3, so 3", "3"),
        ("none at all", None),
        ("", None),
    ],
)
def test_the_final_number_of_a_text(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


def test_a_prompt_without_room_loses_its_beginning(tokenizer):
    prompt = "x" * 30 + "y" * 60
    asked = [{"prompt": prompt, "stop": [], "max_new_tokens": 512}]
    oracle = Oracle(tokenizer, {"y" * 60: ["abc"]}, seq_length=120)
    (written,) = write_texts(oracle, tokenizer, asked, GenerationSettings())
    assert (written.prompt_cut, written.texts[0].text) == (30, "abc")
    oracle = Oracle(tokenizer, {"y" * 60: ["abc"]}, seq_length=70)
    (written,) = write_texts(oracle, tokenizer, asked, GenerationSettings(max_new_tokens=10))
    assert (written.prompt_cut, len(written.texts[0].prompt_ids)) == (30, 60)
    with pytest.raises(InputError, match="max_new_tokens is 70, which leaves no room for a prompt in the 70 tokens"):
        write_texts(oracle, tokenizer, asked, GenerationSettings(max_new_tokens=70))


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_programs_are_run_only_where_that_is_allowed(library, tokenizer, name):
    asked = documents(name, library)
    with pytest.raises(InputError, match=f"{name} runs programs that the model writes, in no sandbox; allow it"):
        evaluate(Oracle(tokenizer, {}), tokenizer, name, asked, GenerationSettings())


# -- the library's own data


def outcomes_of_solutions(asked):
    solved = [program(document, document["solution"]) for document in asked]
    unsolved = [program(document, "") for document in asked]
    return [[result.outcome for result in run_programs(programs)] for programs in (solved, unsolved)]


@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_the_first_solutions_pass_and_empty_ones_fail(library_folder, name):
    asked = documents(name, library_folder)[:4]
    assert outcomes_of_solutions(asked) == [["passed"] * 4, ["failed"] * 4]


@pytest.mark.full
@pytest.mark.timeout(3600)  # 1,328 processes
@pytest.mark.parametrize(("name", "number"), [("humaneval", 164), ("mbpp", 500)])
def test_every_solution_passes_and_no_empty_one(library_folder, name, number):
    asked = documents(name, library_folder)
    assert outcomes_of_solutions(asked) == [["passed"] * number, ["failed"] * number]


def test_the_answers_of_gsm8k_are_the_final_numbers_of_its_solutions(library_folder):
    asked = documents("gsm8k", library_folder)
    assert len(asked) == 1319
    assert [one["doc_id"] for one in asked if final_number(one["solution"]) != final_number(one["answer"])] == []
    assert all(one["prompt"].count("Question:") == 9 for one in asked)
