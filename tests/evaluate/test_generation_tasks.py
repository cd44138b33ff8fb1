"""Answers that a model writes: right ones count, wrong ones do not, and files hold the texts that `generate` writes."""

import json
from decimal import Decimal

import pytest

from megatron_fanformer.cli import main
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.evaluate.code_execution import run_programs
from megatron_fanformer.evaluate.generation_tasks import evaluate, final_number, program, text_problems
from megatron_fanformer.evaluate.prepare import documents
from megatron_fanformer.evaluate.requests import write_requests
from megatron_fanformer.evaluate.results import MetricValue
from megatron_fanformer.evaluate.verb import EvaluateOptions
from megatron_fanformer.generate.generate import generate
from megatron_fanformer.generate.verb import GenerateConfig
from tests.evaluate.oe_data import write_library
from tests.evaluate.oracle import Oracle

NAMES = ("gsm8k", "humaneval", "mbpp")
RUN = EvaluateOptions(allow_code_execution=True)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return write_library(tmp_path_factory.mktemp("library"))


def evaluated(tokenizer, name, asked, texts):
    """The result where the model writes these texts: of each document a list."""
    prompts = {document["prompt"]: written for document, written in zip(asked, texts, strict=True)}
    found = evaluate(Oracle(tokenizer, prompts), tokenizer, name, asked, RUN)
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


@pytest.mark.parametrize(("settings", "seq_length"), [({}, 120), ({"max_new_tokens": 10}, 70)])
def test_a_prompt_without_room_loses_its_beginning(tokenizer, settings, seq_length):
    asked = [{"doc_id": 0, "prompt": "x" * 30 + "y" * 60, "stop": [], "max_new_tokens": 512, "answer": "1"}]
    oracle = Oracle(tokenizer, {"y" * 60: ["abc"]}, seq_length=seq_length)
    found = evaluate(oracle, tokenizer, "gsm8k", asked, EvaluateOptions(**settings))
    assert (found.cut, found.documents[0]["text"]) == (1, "abc")


def test_programs_are_run_only_where_that_is_allowed():
    (problem,) = text_problems(["gsm8k", "mbpp"], EvaluateOptions(), 70)
    assert problem.startswith("mbpp runs programs that the model writes, in no sandbox; allow it")
    assert text_problems(["mbpp"], RUN, 70) == []


# -- the library's own data


EVERY = pytest.param(None, marks=(pytest.mark.full, pytest.mark.timeout(3600)))  # 1,328 processes


@pytest.mark.parametrize("number", [4, EVERY])
@pytest.mark.parametrize("name", ["humaneval", "mbpp"])
def test_solutions_of_the_library_pass_and_empty_ones_fail(library_folder, name, number):
    asked = documents(name, library_folder)[:number]
    for texts, outcome in (([one["solution"] for one in asked], "passed"), ([""] * len(asked), "failed")):
        programs = [program(document, text) for document, text in zip(asked, texts, strict=True)]
        assert {result.outcome for result in run_programs(programs)} == {outcome}


def test_the_answers_of_gsm8k_are_the_final_numbers_of_its_solutions(library_folder):
    asked = documents("gsm8k", library_folder)
    assert len(asked) == 1319
    assert [one["doc_id"] for one in asked if final_number(one["solution"]) != final_number(one["answer"])] == []
    assert all(one["prompt"].count("Question:") == 9 for one in asked)


# -- the verb

NEW_TOKENS = 8


def test_the_result_holds_what_generate_writes_and_how_programs_ended(
    library, exported_folder, tokenizer_file, tmp_path
):
    output, requests = tmp_path / "result.json", tmp_path / "requests"
    texts = {name: documents(name, library) for name in NAMES}
    digest = sha256_of(tokenizer_file)
    write_requests(requests, tokenizer_sha256=digest, context_length=128, versions={}, tasks={}, texts=texts)
    asked = [exported_folder, "--requests", requests, "--max-new-tokens", NEW_TOKENS, "--device", "cpu"]
    asked += ["--allow-code-execution", "--output", output]
    assert main(["evaluate", *map(str, asked)]) == 0
    tasks = json.loads(output.read_text())["tasks"]
    metrics = {"gsm8k": "exact_match", "humaneval": "pass@1", "mbpp": "pass@1"}
    assert {name: task["metric"] for name, task in tasks.items()} == metrics
    config = GenerateConfig(
        checkpoint=str(exported_folder),
        prompts=tuple(document["prompt"] for document in texts["gsm8k"]),
        stop=tuple(texts["gsm8k"][0]["stop"]),
        max_new_tokens=NEW_TOKENS,
    )
    assert [one["text"] for one in tasks["gsm8k"]["documents"]] == [one.text for one in generate(config)]
    assert [one["outcome"] for one in tasks["mbpp"]["documents"]] == ["failed"]  # of a random model
