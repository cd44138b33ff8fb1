"""Tasks of one's own: read and encoded as lm-eval does, and refused by the line where they are no questions."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.data.tokenizer import Tokenizer
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.prepare import own_requests, prepare_requests, read_task
from megatron_fanformer.evaluate.requests import TaskRequests
from megatron_fanformer.evaluate.tasks import resolve
from tests.evaluate.made_up import rows

QUESTIONS: list[dict[str, Any]] = [
    {"context": f"Question {number}?", "choices": ["yes", "no", "Köln"], "answer": number % 3} for number in range(6)
]


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def texts(requests: TaskRequests, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    counts = requests.continuation_tokens.tolist()
    return [
        (tokenizer.decode(ids[:-count]), tokenizer.decode(ids[-count:]))
        for ids, count in zip(rows(requests), counts, strict=True)
    ]


def test_questions_become_requests(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write_lines(tmp_path / "trivia.jsonl", QUESTIONS)
    requests = own_requests(read_task(file), tokenizer, 500, limit=3)
    assert (requests.name, requests.metric) == ("own:trivia", "acc")
    assert requests.documents.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert (requests.choices.tolist(), requests.labels.tolist()) == ([0, 1, 2] * 3, [0] * 3 + [1] * 3 + [2] * 3)
    pairs = [(f"Question {number}?", f" {choice}") for number in range(3) for choice in ("yes", "no", "Köln")]
    assert texts(requests, tokenizer) == pairs
    of_first = {name: values[:3].tolist() for name, values in requests.lengths.items()}
    assert of_first == {
        "characters": [4, 3, 5],
        "characters_no_space": [3, 2, 4],
        "bytes": [4, 3, 6],
        "bytes_no_space": [3, 2, 5],
    }


def test_white_space_between_goes_to_the_choice(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [("a\n", "b"), ("a", "\tb"), ("", "b")]
    stated = [{"context": context, "choices": [choice, "other"], "answer": choice} for context, choice in lines]
    requests = own_requests(read_task(write_lines(tmp_path / "a.jsonl", stated)), tokenizer, 50)
    assert texts(requests, tokenizer)[::2] == [("a", "\nb"), ("a", "\tb"), (tokenizer.piece(tokenizer.eod_id), " b")]
    assert requests.lengths["characters_no_space"][::2].tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"q\.jsonl:2: it is no question \(Input data was truncated\)"),
        ('{"context": "a", "choices": ["b", ""], "answer": 0}', r"q\.jsonl:2: .*length >= 1 - at `\$\.choices\[1\]`"),
        ('{"context": "a", "choices": ["b", "c"], "answer": "d"}', r"q\.jsonl:2: its answer is 'd'"),
        ('{"context": "a", "choices": ["b", "c"], "answer": 2}', r"q\.jsonl:2: its answer is 2"),
        ('{"context": "\\ud800", "choices": ["b", "c"], "answer": 0}', r"q\.jsonl:2: .*surrogate"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = write_lines(tmp_path / "q.jsonl", QUESTIONS[:1])
    file.write_text(file.read_text() + line)
    with pytest.raises(InputError, match=message):
        read_task(file)


def test_a_request_file_holds_them_without_the_library(
    tmp_path: Path, small_tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_fanformer.evaluate.prepare.data_folder", lambda: pytest.fail("it is not needed"))
    file = write_lines(tmp_path / "trivia.jsonl", QUESTIONS)
    read = prepare_requests(tmp_path / "a", tasks=[str(file)], tokenizer=small_tokenizer_file)
    assert len(read.tasks["own:trivia"]) == 18
    assert list(read.tasks) == [task.name for task in resolve(["own:trivia"])]
    with pytest.raises(InputError, match="own:trivia is a task in a request file; name its file"):
        prepare_requests(tmp_path / "b", tasks=["own:trivia"], tokenizer=small_tokenizer_file)
