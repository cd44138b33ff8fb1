"""Tasks whose answers a model writes: GSM8K by its final number, HumanEval and MBPP by running their tests.

Their documents are `task_documents`'. The estimator of pass@k is that of "Evaluating Large Language Models Trained on
Code" (Chen et al., 2021).
"""

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from megatron_fanformer.data.tokenizer import Tokenizer
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate import ulogic
from megatron_fanformer.evaluate.code_execution import Program, run_programs
from megatron_fanformer.evaluate.generated_texts import GenerationSettings, Log, Written, prompts_cut, write_texts
from megatron_fanformer.evaluate.results import TaskResult, mean_value
from megatron_fanformer.evaluate.tasks import ULOGIC
from megatron_fanformer.generate.models import TrainedModel

CODE = ("humaneval", "mbpp")
"""The tasks whose answers are programs."""
PASS_AT = (1, 10, 100)
"""The values of k for pass@k; those above the number of samples are left out."""
# With thousands separated by commas; a minus after a digit is a subtraction. (GSM8K has answers "is - 10".)
NUMBER = re.compile(r"(?:(?<=is )- |(?<!\d)-)?\d[\d,]*(?:\.\d+)?")
NOT_OF_A_NUMBER = str.maketrans("", "", ", ")


def evaluate(
    model: TrainedModel,
    tokenizer: Tokenizer,
    name: str,
    documents: Sequence[dict[str, Any]],
    settings: GenerationSettings,
    *,
    log: Log = lambda line: None,
) -> TaskResult:
    """Make a model write the answers to a task's documents, and judge them.

    Args:
        documents: as `task_documents` gives them, or `ulogic.documents`; at least one.
        log: called with how far it has come.

    Raises:
        InputError: settings are wrong, or programs may not be run: before anything is written.
        DivergenceError: the model's logits are not finite.
    """
    check(name, settings)
    if name == ULOGIC:
        return ulogic.evaluate(model, tokenizer, documents, settings, log=log)
    written = write_texts(model, tokenizer, documents, settings, log=log)
    if name in CODE:
        return _judge_code(documents, written, settings, log)
    return _judge_numbers(documents, written)


def check(name: str, settings: GenerationSettings) -> None:
    """Refuse, before a model is loaded, what can be refused then.

    Raises:
        InputError: as `evaluate`.
    """
    problems = settings.problems()
    if name in CODE and not settings.allow_code_execution:
        problems.append(
            f"{name} runs programs that the model writes, in no sandbox; allow it in a container with "
            f"--allow-code-execution, or leave {name} out"
        )
    if problems:
        raise InputError("\n".join(problems))


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
        numbers = [final_number(text.text) for text in one.texts]
        samples = [
            {**sample, "answer": None if number is None else str(number), "correct": number == answer}
            for sample, number in zip(one.as_dicts(), numbers, strict=True)
        ]
        score = sum(number == answer for number in numbers) / len(numbers)
        judged.append({"doc_id": document["doc_id"], "score": score, "answer": document["answer"], "samples": samples})
    metrics = {"exact_match": mean_value([one["score"] for one in judged])}
    return TaskResult(metric="exact_match", metrics=metrics, documents=judged, cut=prompts_cut(written))


# -- HumanEval and MBPP


def program(document: dict[str, Any], text: str) -> Program:
    """Return a text as a program, behind the head that the model was given, with the document's tests."""
    return Program(f"{document['head']}{text}\n", document["tests"])


def pass_at(k: int, samples: int, passed: int) -> float:
    """Return the unbiased estimate that at least one of k texts passes, from more samples: 1 - C(n - c, k) / C(n,
    k).
    """
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def _judge_code(
    documents: Sequence[dict[str, Any]], written: Sequence[Written], settings: GenerationSettings, log: Log
) -> TaskResult:
    programs = [
        program(document, text.text) for document, one in zip(documents, written, strict=True) for text in one.texts
    ]
    results = run_programs(
        programs, limits=settings.limits, on_result=lambda ended: log(f"{ended:,} of {len(programs):,} programs run")
    )
    outcomes = iter(results)
    judged = []
    for document, one in zip(documents, written, strict=True):
        samples = []
        for sample in one.as_dicts():
            result = next(outcomes)
            samples.append({**sample, "outcome": result.outcome, "message": result.message})
        passed = sum(sample["outcome"] == "passed" for sample in samples)
        score = pass_at(1, len(samples), passed)
        judged.append({"doc_id": document["doc_id"], "score": score, "passed": passed, "samples": samples})
    metrics = {
        f"pass@{k}": mean_value([pass_at(k, settings.num_samples, one["passed"]) for one in judged])
        for k in PASS_AT
        if k <= settings.num_samples
    }
    return TaskResult(metric="pass@1", metrics=metrics, documents=judged, cut=prompts_cut(written))
