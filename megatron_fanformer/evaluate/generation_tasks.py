"""Has a model write answers greedily, and judges them: GSM8K's by the final number, HumanEval's and MBPP's by tests.

A document is a dict of JSON values, as `prepare.documents` returns it and a request file stores it.
"""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from megatron_fanformer.data.tokenizer import Tokenizer
from megatron_fanformer.evaluate.code_execution import Program, run_programs
from megatron_fanformer.evaluate.results import TaskResult, mean_value
from megatron_fanformer.evaluate.tasks import TASKS
from megatron_fanformer.evaluate.verb import EvaluateOptions
from megatron_fanformer.generate.generate import Continuation, continue_all
from megatron_fanformer.generate.models import TrainedModel
from megatron_fanformer.generate.verb import SamplingConfig

CODE = ("humaneval", "mbpp")
"""The tasks whose answers are programs."""
BATCH_SIZE = 16  # answers that are written together; another size gives the same answers
# Commas may separate thousands. A minus after a digit is a subtraction, not a sign. GSM8K has answers "is - 10".
NUMBER = re.compile(r"(?:(?<=is )- |(?<!\d)-)?\d[\d,]*(?:\.\d+)?")


def text_problems(names: Sequence[str], options: EvaluateOptions, seq_length: int) -> list[str]:
    """Return one line for each reason why the answers may not be run as programs, or leave prompts no room."""
    problems = [
        f"{name} runs programs that the model writes, in no sandbox; allow it in a container with "
        f"--allow-code-execution, or leave {name} out"
        for name in names
        if name in CODE and not options.allow_code_execution
    ]
    if options.max_new_tokens is not None and options.max_new_tokens >= seq_length:
        problems.append(
            f"max_new_tokens is {options.max_new_tokens}, which leaves no room for a prompt in the {seq_length} tokens "
            f"that the model was trained on; set it below {seq_length}"
        )
    return problems


def evaluate(
    model: TrainedModel,
    tokenizer: Tokenizer,
    name: str,
    documents: Sequence[dict[str, Any]],
    options: EvaluateOptions,
    *,
    log: Callable[[str], None] = lambda line: None,
) -> TaskResult:
    """Continue each document's `prompt` up to a `stop` string, and judge the answers.

    A prompt that leaves too little room for its answer loses its beginning. Raises DivergenceError if logits are not
    finite.

    Args:
        options: options that passed `text_problems`.
        log: called with the progress.
    """
    seq_length = model.config.seq_length
    prompts = tokenizer.encode_batch([document["prompt"] for document in documents])
    answers, num_cut = [], 0
    for document, ids in zip(documents, prompts, strict=True):
        new_tokens = options.max_new_tokens or min(document["max_new_tokens"], seq_length // 2)
        context = (ids or [tokenizer.eod_id])[new_tokens - seq_length :]  # the last seq_length - new_tokens ids
        num_cut += len(context) < len(ids)
        answer = Continuation(tokenizer, context, SamplingConfig(), max_new_tokens=new_tokens, stop=document["stop"])
        answers.append(answer)
    continue_all(model, answers, BATCH_SIZE, lambda ended: log(f"{ended:,} of {len(answers):,} texts"))
    judge = _judge_programs if name in CODE else _judge_numbers
    verdicts = judge(documents, [answer.text for answer in answers])
    results = [
        {"doc_id": document["doc_id"], "text": answer.text, "tokens": len(answer.ids), "ended_by": answer.ended_by}
        | verdict
        for document, answer, verdict in zip(documents, answers, verdicts, strict=True)
    ]
    metric, value = TASKS[name].metric, mean_value([result["score"] for result in results])
    return TaskResult(metric=metric, metrics={metric: value}, documents=results, cut=num_cut)


def final_number(text: str) -> Decimal | None:
    """Return the last number of a text; None if it has none."""
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "").replace(" ", "")) if numbers else None


def _judge_numbers(documents: Sequence[dict[str, Any]], texts: Sequence[str]) -> list[dict[str, Any]]:
    """Return a verdict on each text, which is right if its last number equals the answer's (18.00 equals 18)."""
    verdicts = []
    for document, text in zip(documents, texts, strict=True):
        number = final_number(text)
        is_right = number is not None and number == final_number(document["answer"])
        answer = None if number is None else str(number)
        verdicts.append({"score": float(is_right), "answer": answer, "expected": document["answer"]})
    return verdicts


def program(document: dict[str, Any], text: str) -> Program:
    """Return a program, made of the prompt's code (`head`) and the model's text, with the document's tests."""
    return Program(f"{document['head']}{text}\n", document["tests"])


def _judge_programs(documents: Sequence[dict[str, Any]], texts: Sequence[str]) -> list[dict[str, Any]]:
    results = run_programs([program(document, text) for document, text in zip(documents, texts, strict=True)])
    return [
        {"score": float(result.outcome == "passed"), "outcome": result.outcome, "message": result.message}
        for result in results
    ]
