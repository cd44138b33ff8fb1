"""ULogic's probe of the law of non-contradiction: a rule and its negation must not be judged alike.

The rules are those of "Can LLMs Reason with Rules?" (Wang et al., ACL 2024), in the user's own `probing_subset.json`:
its repository states no licence, so that no part of it is here. As there, a rule counts if it is judged True and the
rule with the negated conclusion False. The wording of the question is our own, so that figures compare between models
scored by it, and not with those of the paper.

The file is a JSON list with an object for each rule:

    {"v_rule": "If Person X owns Book Y, then Person X can read Book Y.", "length": 1, "label": true, …}

`length` is the number of premises, and `label` says whether the rule is true (so is every one that states nothing). Of
a false one, the rule must be judged False and its negation True. Other fields are passed over.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from megatron_fanformer.data.tokenizer import Tokenizer
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.generation_tasks import GenerationSettings, Log, check, prompts_cut, write_texts
from megatron_fanformer.evaluate.results import MetricValue, TaskResult, mean_value
from megatron_fanformer.evaluate.tasks import ULOGIC
from megatron_fanformer.generate.models import TrainedModel

QUESTION = """\
Is each rule very likely to be true? Answer True or False.

Rule: If Person X has the key of Building Y, then Person X can enter Building Y.
Answer: True

Rule: If Person X was born on the day on which Building Y was opened, then Person X can enter Building Y.
Answer: False

Rule: {rule}
Answer:"""
VERDICTS = ("True", "False")
MOST_NEW_TOKENS = 8
MOST_BYTES = 1 << 30


class Rule(msgspec.Struct):
    """A rule of the file; its other fields are not read."""

    v_rule: Annotated[str, msgspec.Meta(pattern="^If (?!.*, then .*, then ).*, then ")]
    """If …, then …."""
    length: int
    """Number of premises."""
    label: bool | None = None
    """Whether the rule is true; None: it is."""


def documents(path: Path) -> list[dict[str, Any]]:
    """Return the rules of the user's file, each with its negation.

    Raises:
        InputError: it cannot be read, or is not a list of rules.
    """
    try:
        rules = msgspec.json.decode(regular_file(path, most_bytes=MOST_BYTES).read_bytes(), type=list[Rule])
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); name ULogic's probing_subset.json") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path} is no list of rules ({error}); name ULogic's probing_subset.json") from None
    if not rules:
        raise InputError(f"{path} holds no rules; name ULogic's probing_subset.json")
    return [
        {
            "doc_id": number,
            "rule": rule.v_rule.strip(),
            "negation": negated(rule.v_rule.strip()),
            "length": rule.length,
            "label": rule.label is not False,
        }
        for number, rule in enumerate(rules)
    ]


def negated(rule: str) -> str:
    """Return the rule with its conclusion negated: by its `can`, `cannot` or `not`, else behind its first variable's
    verb.
    """
    premise, conclusion = rule.split(", then ")
    for pattern, other in ((r"\bcan ?not\b", "can"), (r"\bcan\b", "cannot"), (r"\bnot ", "")):
        if re.search(pattern, conclusion):
            return f"{premise}, then {re.sub(pattern, other, conclusion, count=1)}"
    words = conclusion.split()
    variable = next((place for place, word in enumerate(words) if word in ("X", "Y")), 0)
    return f"{premise}, then {' '.join([*words[: variable + 2], 'not', *words[variable + 2 :]])}"


def evaluate(
    model: TrainedModel,
    tokenizer: Tokenizer,
    documents: Sequence[dict[str, Any]],
    settings: GenerationSettings,
    *,
    log: Log = lambda line: None,
) -> TaskResult:
    """Judge rules and negations by the likelihood of True and False, and by the model's greedy text.

    Returns:
        `likelihood` and `generation` are the shares of rules that are judged correctly with their negations, also by
        the number of premises; `…_alike` the shares judged like their negations, a contradiction.

    Raises:
        InputError: settings are wrong.
        DivergenceError: the model's logits are not finite.
    """
    check(ULOGIC, settings)
    prompts = [QUESTION.format(rule=document[which]) for document in documents for which in ("rule", "negation")]
    log(f"likelihood of {len(prompts):,} rules and negations")
    likelier = likelier_verdicts(model, tokenizer, prompts)
    questions = [{"prompt": prompt, "stop": ["\n"], "max_new_tokens": MOST_NEW_TOKENS} for prompt in prompts]
    greedy = replace(settings, temperature=0.0, num_samples=1, max_new_tokens=None)
    written = write_texts(model, tokenizer, questions, greedy, log=log)
    texts = [one.texts[0].text for one in written]
    judged = [{name: document[name] for name in ("doc_id", "rule", "negation")} for document in documents]
    metrics: dict[str, MetricValue] = {}
    for way, verdicts in (("likelihood", likelier), ("generation", [stated_verdict(text) for text in texts])):
        pairs = list(zip(verdicts[::2], verdicts[1::2], strict=True))
        scores_by_length: dict[int, list[float]] = {}
        for one, document, pair in zip(judged, documents, pairs, strict=True):
            score = float(pair == ((True, False) if document["label"] else (False, True)))
            one[way] = {"verdicts": list(pair), "score": score}
            scores_by_length.setdefault(document["length"], []).append(score)
        metrics[way] = mean_value([one[way]["score"] for one in judged])
        metrics[f"{way}_alike"] = mean_value([float(rule is not None and rule == other) for rule, other in pairs])
        metrics |= {f"{way}_length_{n}": mean_value(scores) for n, scores in sorted(scores_by_length.items())}
    for number, one in enumerate(judged):
        one["score"] = one["likelihood"]["score"]
        one["samples"] = [{"text": text} for text in texts[2 * number : 2 * number + 2]]
    return TaskResult(metric="likelihood", metrics=metrics, documents=judged, cut=prompts_cut(written))


def stated_verdict(text: str) -> bool | None:
    """True or False where the text says one of the two words alone; else None."""
    says_true, says_false = (verdict in text for verdict in VERDICTS)
    return None if says_true == says_false else says_true


def likelier_verdicts(model: TrainedModel, tokenizer: Tokenizer, prompts: Sequence[str]) -> list[bool | None]:
    """Return for each prompt whether True is likelier to follow it than False; None if both are as likely."""
    encoded = tokenizer.encode_batch(prompts)
    of_both = [
        _log_likelihoods(model, encoded, tokenizer.encode(f" {verdict}"))  # of all prompts
        for verdict in VERDICTS
    ]
    return [None if true == false else true > false for true, false in zip(*of_both, strict=True)]


def _log_likelihoods(model: TrainedModel, prompts: Sequence[list[int]], ending: list[int]) -> list[float]:
    """Return the log-likelihood of the ending behind each prompt, which loses its beginning where it is too long."""
    ids = torch.tensor(ending)
    likelihoods = []
    for prompt in prompts:
        row = [*prompt[len(ending) - model.config.seq_length :], *ending]
        log_probabilities = model.logits(torch.tensor([row]))[0, -len(ending) - 1 : -1].double().log_softmax(-1)
        likelihoods.append(log_probabilities.cpu().gather(1, ids[:, None]).sum().item())
    return likelihoods
