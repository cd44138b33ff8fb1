"""Tasks whose answers a model writes: GSM8K by its final number, HumanEval and MBPP by their tests, and ULogic.

A document is a dict of JSON's values, as `prepare.documents` makes it and a request file keeps it. The estimator of
pass@k is that of "Evaluating Large Language Models Trained on Code" (Chen et al., 2021).
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from megatron_fanformer.data.tokenizer import Tokenizer
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.code_execution import Program, run_programs
from megatron_fanformer.evaluate.results import MetricValue, TaskResult, mean_value
from megatron_fanformer.evaluate.tasks import ULOGIC
from megatron_fanformer.evaluate.verb import EvaluateOptions
from megatron_fanformer.generate.continuation import Continuation, continue_all
from megatron_fanformer.generate.models import TrainedModel

Log = Callable[[str], None]

CODE = ("humaneval", "mbpp")
"""The tasks whose answers are programs."""
BATCH_SIZE = 16  # texts written together, which does not change them
PASS_AT = (1, 10, 100)
"""The values of k for pass@k; those above the number of samples are left out."""
# With thousands separated by commas; a minus after a digit is a subtraction. (GSM8K has answers "is - 10".)
NUMBER = re.compile(r"(?:(?<=is )- |(?<!\d)-)?\d[\d,]*(?:\.\d+)?")
NOT_OF_A_NUMBER = str.maketrans("", "", ", ")
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


def text_problems(names: Sequence[str], options: EvaluateOptions, seq_length: int) -> list[str]:
    """List why a model of sequences of that length cannot write the answers to tasks, or may not."""
    problems = [
        f"{name} runs programs that the model writes, in no sandbox; allow it in a container with "
        f"--allow-code-execution, or leave {name} out"
        for name in names
        if name in CODE and not options.allow_code_execution
    ]
    new_tokens = 0 if options.max_new_tokens is None else options.max_new_tokens
    if new_tokens >= seq_length and set(names) != {ULOGIC}:  # whose answers have a length of their own
        problems.append(
            f"max_new_tokens is {new_tokens}, which leaves no room for a prompt in the {seq_length} tokens that the "
            f"model was trained on; set it below {seq_length}"
        )
    return problems


def evaluate(
    model: TrainedModel,
    tokenizer: Tokenizer,
    name: str,
    documents: Sequence[dict[str, Any]],
    options: EvaluateOptions,
    *,
    log: Log = lambda line: None,
) -> TaskResult:
    """Make a model write the answers to a task's documents, at least one, and judge them.

    Args:
        options: without `text_problems`.
        log: called with its progress.

    Raises:
        DivergenceError: the model's logits are not finite.
    """
    if name == ULOGIC:
        return _judge_rules(model, tokenizer, documents, options, log=log)
    written = write_texts(model, tokenizer, documents, options, log=log)
    if name in CODE:
        return _judge_code(documents, written, options, log)
    return _judge_numbers(documents, written)


# -- texts


@dataclass(frozen=True, kw_only=True)
class Written:
    """The texts that were written for one document."""

    texts: list[Continuation]
    """One text for each sample."""
    prompt_cut: int
    """Tokens cut from the prompt's beginning for lack of room."""

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the texts as a result keeps them."""
        return [{"text": one.text, "tokens": len(one.ids), "ended_by": one.ended_by} for one in self.texts]


def write_texts(
    model: TrainedModel,
    tokenizer: Tokenizer,
    documents: Sequence[dict[str, Any]],
    options: EvaluateOptions,
    *,
    log: Log = lambda line: None,
) -> list[Written]:
    """Continue each document's `prompt` to its `stop` strings; a prompt without room loses its beginning.

    Raises:
        DivergenceError: the model's logits are not finite.
    """
    longest = model.config.seq_length
    prompts = tokenizer.encode_batch([document["prompt"] for document in documents])
    written = []
    for document, ids in zip(documents, prompts, strict=True):
        new_tokens = options.max_new_tokens or min(document["max_new_tokens"], longest // 2)
        kept = (ids or [tokenizer.eod_id])[new_tokens - longest :]
        texts = [
            Continuation(tokenizer, kept, options, sample=sample, max_new_tokens=new_tokens, stop=document["stop"])
            for sample in range(options.num_samples)
        ]
        written.append(Written(texts=texts, prompt_cut=max(len(ids) - len(kept), 0)))
    every = [text for one in written for text in one.texts]
    continue_all(model, every, batch_size=BATCH_SIZE, on_batch=lambda ended: log(f"{ended:,} of {len(every):,} texts"))
    return written


def prompts_cut(written: Sequence[Written]) -> int:
    """Return the number of prompts that lost their beginning."""
    return sum(one.prompt_cut > 0 for one in written)


# -- GSM8K


def final_number(text: str) -> Decimal | None:
    """Return the last number of a text; None if it has none."""
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].translate(NOT_OF_A_NUMBER)) if numbers else None


def _judge_numbers(documents: Sequence[dict[str, Any]], written: Sequence[Written]) -> TaskResult:
    """Judge by the last number of each text, which must be the answer's, as a number: 18.00 is 18."""
    judged = []
    for document, one in zip(documents, written, strict=True):
        answer = final_number(document["answer"])
        samples = one.as_dicts()
        for sample in samples:
            number = final_number(sample["text"])
            sample |= {"answer": None if number is None else str(number), "correct": number == answer}
        score = sum(sample["correct"] for sample in samples) / len(samples)
        judged.append({"doc_id": document["doc_id"], "score": score, "answer": document["answer"], "samples": samples})
    metrics = {"exact_match": mean_value([one["score"] for one in judged])}
    return TaskResult(metric="exact_match", metrics=metrics, documents=judged, cut=prompts_cut(written))


# -- HumanEval and MBPP


def program(document: dict[str, Any], text: str) -> Program:
    """Return a text as a program, behind the head that the model was given, with the document's tests."""
    return Program(f"{document['head']}{text}\n", document["tests"])


def pass_at(k: int, samples: int, passed: int) -> float:
    """Return the unbiased estimate that at least one of k texts passes: 1 - C(n - c, k) / C(n, k)."""
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def _judge_code(
    documents: Sequence[dict[str, Any]], written: Sequence[Written], options: EvaluateOptions, log: Log
) -> TaskResult:
    programs = [
        program(document, text.text) for document, one in zip(documents, written, strict=True) for text in one.texts
    ]
    results = run_programs(programs, on_result=lambda ended: log(f"{ended:,} of {len(programs):,} programs run"))
    outcomes = iter(results)
    judged = []
    for document, one in zip(documents, written, strict=True):
        samples = one.as_dicts()
        for sample, result in zip(samples, outcomes, strict=False):
            sample |= {"outcome": result.outcome, "message": result.message}
        passed = sum(sample["outcome"] == "passed" for sample in samples)
        score = pass_at(1, len(samples), passed)
        judged.append({"doc_id": document["doc_id"], "score": score, "passed": passed, "samples": samples})
    metrics = {
        f"pass@{k}": mean_value([pass_at(k, options.num_samples, one["passed"]) for one in judged])
        for k in PASS_AT
        if k <= options.num_samples
    }
    return TaskResult(metric="pass@1", metrics=metrics, documents=judged, cut=prompts_cut(written))


# -- ULogic: a rule and its negation must not be judged alike (the law of non-contradiction)
#
# The rules are those of "Can LLMs Reason with Rules?" (Wang et al., ACL 2024), in the user's own `probing_subset.json`:
# its repository states no licence, so that no part of it is here. As there, a rule counts if it is judged True and the
# rule with the negated conclusion False; a false one, the other way round. The wording of the question is our own, so
# that figures compare between models scored by it, and not with those of the paper.


class Rule(msgspec.Struct):
    """A rule of the file; its other fields are not read."""

    v_rule: Annotated[str, msgspec.Meta(pattern="^If (?!.*, then .*, then ).*, then ")]
    """If …, then …."""
    length: int
    """Number of premises."""
    label: bool | None = None
    """False for a rule that is not true."""


def ulogic_rules(path: Path) -> list[dict[str, Any]]:
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
    """Negate a rule's conclusion: by its `can`, `cannot` or `not`, else behind its first variable's verb."""
    premise, conclusion = rule.split(", then ")
    for pattern, other in ((r"\bcan ?not\b", "can"), (r"\bcan\b", "cannot"), (r"\bnot ", "")):
        if re.search(pattern, conclusion):
            return f"{premise}, then {re.sub(pattern, other, conclusion, count=1)}"
    words = conclusion.split()
    variable = next((place for place, word in enumerate(words) if word in ("X", "Y")), 0)
    return f"{premise}, then {' '.join([*words[: variable + 2], 'not', *words[variable + 2 :]])}"


def _judge_rules(
    model: TrainedModel,
    tokenizer: Tokenizer,
    documents: Sequence[dict[str, Any]],
    options: EvaluateOptions,
    *,
    log: Log,
) -> TaskResult:
    """Judge rules and negations by the likelihood of True and False, and by the model's greedy text.

    Returns:
        `likelihood` and `generation` are the shares of rules that are judged correctly with their negations, also by
        the number of premises; `…_alike` the shares judged like their negations, a contradiction.
    """
    prompts = [QUESTION.format(rule=document[which]) for document in documents for which in ("rule", "negation")]
    log(f"likelihood of {len(prompts):,} rules and negations")
    likelier = likelier_verdicts(model, tokenizer, prompts)
    questions = [{"prompt": prompt, "stop": ["\n"], "max_new_tokens": MOST_NEW_TOKENS} for prompt in prompts]
    greedy = replace(options, temperature=0.0, num_samples=1, max_new_tokens=None)
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
    """Return True or False where the text says one of the two words alone; else None."""
    says_true, says_false = (verdict in text for verdict in VERDICTS)
    return None if says_true == says_false else says_true


def likelier_verdicts(model: TrainedModel, tokenizer: Tokenizer, prompts: Sequence[str]) -> list[bool | None]:
    """Return for each prompt whether True is likelier to follow it than False; None if both are as likely."""
    encoded = tokenizer.encode_batch(prompts)
    likelihoods = [_log_likelihoods(model, encoded, tokenizer.encode(f" {verdict}")) for verdict in VERDICTS]
    return [None if true == false else true > false for true, false in zip(*likelihoods, strict=True)]


def _log_likelihoods(model: TrainedModel, prompts: Sequence[list[int]], ending: list[int]) -> list[float]:
    """Return the log-likelihood of the ending behind each prompt, which loses its beginning where it is too long."""
    ids = torch.tensor(ending)
    likelihoods = []
    for prompt in prompts:
        row = [*prompt[len(ending) - model.config.seq_length :], *ending]
        log_probabilities = model.logits(torch.tensor([row]))[0, -len(ending) - 1 : -1].double().log_softmax(-1)
        likelihoods.append(log_probabilities.cpu().gather(1, ids[:, None]).sum().item())
    return likelihoods
