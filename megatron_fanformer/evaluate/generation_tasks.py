"""Tasks whose answers a model writes, greedily: GSM8K by its final number, HumanEval and MBPP by their tests.

A document is a dict of JSON's values, as `prepare.documents` makes it and a request file keeps it.
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
BATCH_SIZE = 16  # texts written together, which does not change them
# With thousands separated by commas; a minus after a digit is a subtraction. (GSM8K has answers "is - 10".)
NUMBER = re.compile(r"(?:(?<=is )- |(?<!\d)-)?\d[\d,]*(?:\.\d+)?")
NOT_OF_A_NUMBER = str.maketrans("", "", ", ")


def text_problems(names: Sequence[str], options: EvaluateOptions, seq_length: int) -> list[str]:
    """List why a model of sequences of that length cannot write the answers to tasks, or may not."""
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
    """Continue each document's `prompt` to its `stop` strings, and judge the texts.

    A prompt without room loses its beginning.

    Args:
        options: without `text_problems`.
        log: called with its progress.

    Raises:
        DivergenceError: the model's logits are not finite.
    """
    longest = model.config.seq_length
    prompts = tokenizer.encode_batch([document["prompt"] for document in documents])
    texts, cut = [], 0
    for document, ids in zip(documents, prompts, strict=True):
        new_tokens = options.max_new_tokens or min(document["max_new_tokens"], longest // 2)
        kept = (ids or [tokenizer.eod_id])[new_tokens - longest :]
        cut += len(kept) < len(ids)
        texts.append(Continuation(tokenizer, kept, SamplingConfig(), max_new_tokens=new_tokens, stop=document["stop"]))
    continue_all(model, texts, BATCH_SIZE, lambda ended: log(f"{ended:,} of {len(texts):,} texts"))
    written = [text.text for text in texts]
    verdicts = (_run_programs if name in CODE else _compare_numbers)(documents, written)
    judged = [
        {"doc_id": document["doc_id"], "text": text.text, "tokens": len(text.ids), "ended_by": text.ended_by, **verdict}
        for document, text, verdict in zip(documents, texts, verdicts, strict=True)
    ]
    metric = TASKS[name].metric
    return TaskResult(
        metric=metric, metrics={metric: mean_value([one["score"] for one in judged])}, documents=judged, cut=cut
    )


def final_number(text: str) -> Decimal | None:
    """Return the last number of a text; None if it has none."""
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].translate(NOT_OF_A_NUMBER)) if numbers else None


def _compare_numbers(documents: Sequence[dict[str, Any]], texts: Sequence[str]) -> list[dict[str, Any]]:
    """Judge by the last number of each text, which must be the answer's, as a number: 18.00 is 18."""
    verdicts = []
    for document, text in zip(documents, texts, strict=True):
        number = final_number(text)
        is_right = number is not None and number == final_number(document["answer"])
        answer = None if number is None else str(number)
        verdicts.append({"score": float(is_right), "answer": answer, "expected": document["answer"]})
    return verdicts


def program(document: dict[str, Any], text: str) -> Program:
    """Return a text as a program, behind the head that the model was given, with the document's tests."""
    return Program(f"{document['head']}{text}\n", document["tests"])


def _run_programs(documents: Sequence[dict[str, Any]], texts: Sequence[str]) -> list[dict[str, Any]]:
    results = run_programs([program(document, text) for document, text in zip(documents, texts, strict=True)])
    return [
        {"score": float(result.outcome == "passed"), "outcome": result.outcome, "message": result.message}
        for result in results
    ]
