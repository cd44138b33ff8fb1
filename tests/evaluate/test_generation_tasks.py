"""Answers that a model writes: right ones count, wrong ones do not, and files hold the texts that `generate` writes."""

import itertools
import json
import math
from decimal import Decimal

import pytest
import torch

from megatron_fanformer.cli import main
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.code_execution import run_programs
from megatron_fanformer.evaluate.generation_tasks import (
    QUESTION,
    _log_likelihoods,
    evaluate,
    final_number,
    negated,
    pass_at,
    program,
    stated_verdict,
    text_problems,
    ulogic_rules,
    write_texts,
)
from megatron_fanformer.evaluate.prepare import documents
from megatron_fanformer.evaluate.requests import write_requests
from megatron_fanformer.evaluate.results import MetricValue
from megatron_fanformer.evaluate.verb import EvaluateOptions
from megatron_fanformer.generate.generate import generate
from megatron_fanformer.generate.verb import GenerateConfig
from tests.evaluate.oe_data import write_library
from tests.evaluate.oracle import Oracle
from tests.generate.making import with_model

NAMES = ("gsm8k", "humaneval", "mbpp")
RUN = EvaluateOptions(allow_code_execution=True)


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
    settings = EvaluateOptions(allow_code_execution=True, num_samples=10, temperature=0.5)
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
    (written,) = write_texts(oracle, tokenizer, asked, EvaluateOptions())
    assert (written.prompt_cut, written.texts[0].text) == (30, "abc")
    oracle = Oracle(tokenizer, {"y" * 60: ["abc"]}, seq_length=70)
    (written,) = write_texts(oracle, tokenizer, asked, EvaluateOptions(max_new_tokens=10))
    assert (written.prompt_cut, len(written.texts[0].prompt_ids)) == (30, 60)
    (problem,) = text_problems(["gsm8k"], EvaluateOptions(max_new_tokens=70), 70)
    assert problem.startswith("max_new_tokens is 70, which leaves no room for a prompt in the 70 tokens")


def test_programs_are_run_only_where_that_is_allowed():
    (problem,) = text_problems(["gsm8k", "mbpp"], EvaluateOptions(), 70)
    assert problem.startswith("mbpp runs programs that the model writes, in no sandbox; allow it")
    assert text_problems(["mbpp"], RUN, 70) == []


# -- the library's own data


EVERY = (pytest.mark.full, pytest.mark.timeout(3600))  # 1,328 processes


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("humaneval", 4),
        ("mbpp", 4),
        pytest.param("humaneval", 164, marks=EVERY),
        pytest.param("mbpp", 500, marks=EVERY),
    ],
)
def test_solutions_of_the_library_pass_and_empty_ones_fail(library_folder, name, number):
    asked = documents(name, library_folder)[: number if number == 4 else None]
    for texts, outcome in (([one["solution"] for one in asked], "passed"), ([""] * number, "failed")):
        programs = [program(document, text) for document, text in zip(asked, texts, strict=True)]
        assert [result.outcome for result in run_programs(programs)] == [outcome] * number


def test_the_answers_of_gsm8k_are_the_final_numbers_of_its_solutions(library_folder):
    asked = documents("gsm8k", library_folder)
    assert len(asked) == 1319
    assert [one["doc_id"] for one in asked if final_number(one["solution"]) != final_number(one["answer"])] == []
    assert all(one["prompt"].count("Question:") == 9 for one in asked)


# -- ULogic

RULES = [
    {"v_rule": "If Person X owns Boat Y, then Person X can sail Boat Y.", "length": 1, "label": True, "domain": "a"},
    {"v_rule": "If Person X sank Boat Y, then Person X cannot sail Boat Y.", "length": 1},
    {"v_rule": "If A and B, then Boat X is the pride of Region Y.", "length": 2, "label": True},
    {"v_rule": "If Boat Y is blue, then Person X is not its owner.", "length": 1, "label": False},
]


@pytest.fixture
def rules(tmp_path):
    path = tmp_path / "probing_subset.json"
    path.write_text(json.dumps(RULES))
    return ulogic_rules(path)


@pytest.mark.parametrize(
    ("conclusion", "other"),
    [
        ("Person X can sail Boat Y.", "Person X cannot sail Boat Y."),
        ("Person X cannot sail Boat Y.", "Person X can sail Boat Y."),
        ("Person X can not sail.", "Person X can sail."),
        ("Person X is not the owner of Boat Y.", "Person X is the owner of Boat Y."),
        ("Person X is the owner of Boat Y.", "Person X is not the owner of Boat Y."),
        ("the origin of Boat X is Region Y.", "the origin of Boat X is not Region Y."),
        ("American Person X sails.", "American Person X sails. not"),
    ],
)
def test_a_rule_is_negated_in_its_conclusion(conclusion, other):
    assert negated(f"If A can not, then {conclusion}") == f"If A can not, then {other}"


class Judge(Oracle):
    """Says of each rule what `verdict(rule)` says, in its text and by its likelihoods."""

    def __init__(self, tokenizer, rules, verdict):
        asked = [rule[which] for rule in rules for which in ("rule", "negation")]
        self._verdicts = {tuple(tokenizer.encode(QUESTION.format(rule=rule))): verdict(rule) for rule in asked}
        message = {QUESTION.format(rule=rule): [f" {verdict(rule)}\nRule: ..."] for rule in asked}
        super().__init__(tokenizer, message)

    def logits(self, ids_bs):
        logits = torch.zeros(*ids_bs.shape, self._vocab_size)
        for number, ids in enumerate(ids_bs.tolist()):
            (prompt, verdict) = next(one for one in self._verdicts.items() if one[0] == tuple(ids[: len(one[0])]))
            logits[number, len(prompt), ord(str(verdict)[0])] = 20.0  # the words have not the same length here
        return logits


def values(found):
    return {name: metric.value for name, metric in found.metrics.items()}


def test_a_judge_that_contradicts_itself_nowhere_is_right_everywhere(tokenizer, rules):
    true = {rule["rule"] if rule["label"] else rule["negation"] for rule in rules}
    judge = Judge(tokenizer, rules, lambda rule: rule in true)
    found = evaluate(judge, tokenizer, "ulogic", rules, EvaluateOptions())
    for way in ("likelihood", "generation"):
        assert found.metrics[way] == MetricValue(value=1.0, standard_error=0.0, documents=4)
        assert found.metrics[f"{way}_alike"].value == 0.0
    assert found.metrics["generation_length_2"].documents == 1
    assert [one["score"] for one in found.documents] == [1.0] * 4


def test_a_judge_that_says_true_to_all_contradicts_itself_everywhere(tokenizer, rules):
    found = evaluate(Judge(tokenizer, rules, lambda _: True), tokenizer, "ulogic", rules, EvaluateOptions())
    assert values(found) == {
        f"{way}{what}": float(what == "_alike")
        for way in ("likelihood", "generation")
        for what in ("", "_alike", "_length_1", "_length_2")
    }


@pytest.mark.parametrize(
    ("text", "verdict"),
    [(" True", True), (" It is False.", False), (" True or False", None), (" true", None), ("", None)],
)
def test_a_text_must_say_one_word_alone(text, verdict):
    assert stated_verdict(text) is verdict


def likelihoods(model, prompts, ending):
    """By the batch, and one prompt at a time from the whole sequence's logits."""
    alone = []
    for prompt in prompts:
        ids = [*prompt, *ending]
        log_probabilities = model.logits(torch.tensor([ids]))[0].double().log_softmax(-1)
        alone.append(sum(log_probabilities[place - 1, ids[place]].item() for place in range(len(prompt), len(ids))))
    return _log_likelihoods(model, prompts, ending), alone


def test_likelihoods_are_sums_over_the_ending_alone(run_folder, run_on_ranks):
    prompts = [[7, 99, 3], [5, 6], [41, 3, 8], list(range(1, 100))]
    ((together, alone),) = run_on_ranks(1, with_model, run_folder, likelihoods, prompts, [84, 114, 117])
    assert together == pytest.approx(alone, abs=1e-5)
    assert not any(math.isclose(a, b, abs_tol=1e-3) for a, b in itertools.pairwise(together))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no list of rules"),
        ("[]", "holds no rules"),
        ('["If A, then B."]', "Expected `object`, got `str` - at `$[0]`"),
        ('[{"v_rule": "If A, then B, then C.", "length": 1}]', "matching regex"),
        ('[{"v_rule": "If A, then B."}]', "missing required field `length` - at `$[0]`"),
        (
            '[{"v_rule": "If A, then B.", "length": 1, "label": "yes"}]',
            "got `str` - at `$[0].label`",
        ),
        (None, "cannot be read (No such file or directory); name ULogic's"),
    ],
)
def test_a_file_of_another_form_or_none_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "rules.json").write_text(content)
    with pytest.raises(InputError) as caught:
        ulogic_rules(tmp_path / "rules.json")
    assert message in str(caught.value)


# -- the verb

NEW_TOKENS = 8


def test_the_result_holds_what_generate_writes_and_how_programs_ended(
    library, exported_folder, tokenizer_file, tmp_path
):
    output, requests, rules = (tmp_path / name for name in ("result.json", "requests", "rules.json"))
    texts = {name: documents(name, library) for name in NAMES}
    digest = sha256_of(tokenizer_file)
    write_requests(requests, tokenizer_sha256=digest, context_length=128, versions={}, tasks={}, texts=texts)
    rules.write_text(json.dumps(RULES))
    asked = [exported_folder, "--requests", requests, "--max-new-tokens", NEW_TOKENS, "--device", "cpu"]
    asked += ["--ulogic", rules, "--allow-code-execution", "--output", output]
    assert main(["evaluate", *map(str, asked)]) == 0
    tasks = json.loads(output.read_text())["tasks"]
    assert {name: task["metric"] for name, task in tasks.items()} == {
        "gsm8k": "exact_match",
        "humaneval": "pass@1",
        "mbpp": "pass@1",
        "ulogic": "likelihood",
    }
    config = GenerateConfig(
        checkpoint=str(exported_folder),
        prompts=tuple(document["prompt"] for document in texts["gsm8k"]),
        stop=tuple(texts["gsm8k"][0]["stop"]),
        max_new_tokens=NEW_TOKENS,
    )
    written = [one["samples"][0]["text"] for one in tasks["gsm8k"]["documents"]]
    assert written == [one.text for one in generate(config)]
    assert {len(document["samples"]) for document in tasks["gsm8k"]["documents"]} == {1}
    assert [one["samples"][0]["outcome"] for one in tasks["mbpp"]["documents"]] == ["failed"]  # of a random model
    assert tasks["ulogic"]["metrics"]["generation"]["documents"] == len(RULES)
    assert tasks["ulogic"]["cut"] == 2 * len(RULES)  # the question is longer than the model's 128 tokens
