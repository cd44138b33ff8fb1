"""ULogic's probe: rules and their negations, judged by likelihood and by text; the rules are made up."""

import itertools
import json
import math

import pytest
import torch

from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.generation_tasks import GenerationSettings
from megatron_fanformer.evaluate.results import MetricValue
from megatron_fanformer.evaluate.ulogic import (
    QUESTION,
    _log_likelihoods,
    documents,
    evaluate,
    negated,
    stated_verdict,
)
from tests.evaluate.oracle import Oracle
from tests.generate.making import with_model, write_checkpoint

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
    return documents(path)


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
    found = evaluate(judge, tokenizer, rules, GenerationSettings())
    for way in ("likelihood", "generation"):
        assert found.metrics[way] == MetricValue(value=1.0, standard_error=0.0, documents=4)
        assert found.metrics[f"{way}_alike"].value == 0.0
    assert found.metrics["generation_length_2"].documents == 1
    assert [one["score"] for one in found.documents] == [1.0] * 4


def test_a_judge_that_says_true_to_all_contradicts_itself_everywhere(tokenizer, rules):
    found = evaluate(Judge(tokenizer, rules, lambda _: True), tokenizer, rules, GenerationSettings())
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


def test_likelihoods_are_sums_over_the_ending_alone(tmp_path, tokenizer, run_on_ranks):
    run_on_ranks(1, write_checkpoint, tmp_path, "fanformer-tied", tokenizer.path)
    prompts = [[7, 99, 3], [5, 6], [41, 3, 8], list(range(1, 100))]
    ((together, alone),) = run_on_ranks(1, with_model, tmp_path, likelihoods, prompts, [84, 114, 117])
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
        documents(tmp_path / "rules.json")
    assert message in str(caught.value)
