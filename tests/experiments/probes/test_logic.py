"""ULogic on a checkpoint: our own rules are of its form, and a user's file is read."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from megatron_fanformer.evaluation import ulogic
from megatron_fanformer.experiments.probes import logic
from megatron_fanformer.experiments.probes.settings import LogicSettings
from tests.generation.making import write_export, write_tokenizer


def test_our_rules_are_of_ulogics_form(tmp_path):
    lengths = [length for length, _ in logic.RULES]
    assert sorted(lengths) == [1] * 5 + [2] * 5 + [3] * 5 + [4] * 5
    for length, rule in logic.RULES:
        premises = rule.removeprefix("If ").partition(", then ")[0]
        assert len(premises.replace(", ", " and ").split(" and ")) == length, rule
        assert ulogic.negated(ulogic.negated(rule)) == rule != ulogic.negated(rule)


def test_a_tokenizer_ends_texts_as_the_checkpoint_states(tmp_path, monkeypatch):
    source = SimpleNamespace(tokenizer=write_tokenizer(tmp_path, end_of_text="<end>"), end_of_text_id=7)
    monkeypatch.setattr(logic, "find_model", lambda _: source)
    monkeypatch.setattr(logic, "load_model", lambda _: nullcontext())
    metrics = {name: {"value": 0.5, "standard_error": 0.1} for name in ("likelihood", "generation")}
    asked = []

    def evaluate(_model, tokenizer, *_, **__):
        asked.append(tokenizer.eod_id)
        of_all = {name: {**each, "documents": 20} for name, each in metrics.items()}
        return {"metrics": of_all | {f"{name}_alike": each for name, each in of_all.items()}}

    monkeypatch.setattr(ulogic, "evaluate", evaluate)
    logic.measure(LogicSettings(checkpoints=("none",)), tmp_path, lambda _: None)
    assert asked == [7]


@pytest.mark.full
def test_a_checkpoint_is_asked(tmp_path):
    checkpoint = tmp_path / "export"
    write_export(checkpoint, "grouped-queries", write_tokenizer(tmp_path))
    settings = LogicSettings(checkpoints=(str(checkpoint),))
    measured = logic.measure(settings, tmp_path, lambda _: None)
    assert [finding.shows for finding in measured.findings] == [None, None]
    assert measured.findings[0].interval[0] <= measured.findings[0].ours <= measured.findings[0].interval[1]
    rules = tmp_path / "own.json"
    rules.write_text(json.dumps([{"v_rule": rule, "length": length} for length, rule in logic.RULES[:3]]))
    few = logic.measure(LogicSettings(checkpoints=(str(checkpoint),), rules=str(rules)), tmp_path, lambda _: None)
    assert "3 rules" in few.findings[0].sentence
