"""Tasks of one's own: read, drawn and encoded as lm-eval does, and refused by name where they are not plain."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.data.tokenizer import Tokenizer
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluation.own_tasks import own_requests, read_task
from megatron_fanformer.evaluation.prepare import prepare_requests
from megatron_fanformer.evaluation.requests import TaskRequests, read_requests
from megatron_fanformer.evaluation.tasks import resolve
from tests.evaluation.made_up import rows

QUESTIONS: list[dict[str, Any]] = [
    {"context": f"Question {number}?", "choices": ["yes", "no", "Köln"], "answer": number % 3} for number in range(6)
]
PLAIN = {
    "task": "plain",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "q.jsonl", "train": "shots.jsonl"}},
    "test_split": "test",
    "fewshot_split": "train",
    "output_type": "multiple_choice",
    "doc_to_text": "Q: {{context}}\nA:",
    "doc_to_choice": "choices",
    "doc_to_target": "{{answer}}",
}
DRAWN_BY_LM_EVAL = [[3, 4], [0, 4], [5, 0]]
"""Of six, without the document itself, by lm-eval 0.4.13's ContextSampler with seed 1234: for documents 0, 1 and 2."""


def write_lines(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_yaml(folder: Path, **fields: Any) -> Path:
    write_lines(folder / "q.jsonl", QUESTIONS)
    write_lines(folder / "shots.jsonl", [{"context": "1 + 1", "choices": ["2", "3"], "answer": 0}])
    path = folder / "task.yaml"
    stated = {name: value for name, value in {**PLAIN, **fields}.items() if value is not None}
    path.write_text(json.dumps(stated))
    return path


def texts(requests: TaskRequests, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    counts = requests.continuation_tokens.tolist()
    return [
        (tokenizer.decode(ids[:-count]), tokenizer.decode(ids[-count:]))
        for ids, count in zip(rows(requests), counts, strict=True)
    ]


def test_questions_become_requests_with_drawn_examples(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write_lines(tmp_path / "trivia.jsonl", QUESTIONS)
    requests = own_requests(read_task(file, 2), tokenizer, 500, limit=3)
    assert (requests.name, requests.metric) == ("own:trivia", "acc")
    assert requests.documents.tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert (requests.choices.tolist(), requests.labels.tolist()) == ([0, 1, 2] * 3, [0] * 3 + [1] * 3 + [2] * 3)
    found = texts(requests, tokenizer)
    for document, drawn in enumerate(DRAWN_BY_LM_EVAL):
        shown = "".join(f"Question {number}? {QUESTIONS[number]['choices'][number % 3]}\n\n" for number in drawn)
        of_it = found[3 * document : 3 * document + 3]
        assert of_it == [(f"{shown}Question {document}?", f" {choice}") for choice in ("yes", "no", "Köln")]
    of_first = {name: values[:3].tolist() for name, values in requests.lengths.items()}
    assert of_first == {
        "characters": [4, 3, 5],
        "characters_no_space": [3, 2, 4],
        "bytes": [4, 3, 6],
        "bytes_no_space": [3, 2, 5],
    }
    other = own_requests(read_task(file, 2), tokenizer, 500, limit=3, seed=1)
    assert rows(other) != rows(requests)


def test_white_space_between_goes_to_the_choice(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [("a\n", "b"), ("a", "\tb"), ("", "b")]
    stated = [{"context": context, "choices": [choice, "other"], "answer": choice} for context, choice in lines]
    requests = own_requests(read_task(write_lines(tmp_path / "a.jsonl", stated)), tokenizer, 50)
    assert texts(requests, tokenizer)[::2] == [("a", "\nb"), ("a", "\tb"), (tokenizer.piece(tokenizer.eod_id), " b")]


@pytest.mark.parametrize(
    ("fields", "context", "choices"),
    [
        ({}, "Q: Question 1?\nA:", [" yes", " no", " Köln"]),
        ({"doc_to_text": "context", "target_delimiter": ""}, "Question 1?", ["yes", "no", "Köln"]),
        ({"doc_to_choice": ["ja", "nein"], "doc_to_target": 1}, "Q: Question 1?\nA:", [" ja", " nein"]),
        (
            {"doc_to_choice": "{{[choices[0], 'a, b', choices[2]]}}", "description": "Say.\n"},
            "Say.\nQ: Question 1?\nA:",
            [" yes", " a, b", " Köln"],
        ),
        ({"num_fewshot": 1}, "Q: 1 + 1\nA: 2\n\nQ: Question 1?\nA:", [" yes", " no", " Köln"]),
        ({"doc_to_text": "{{ context.strip() | trim }}", "tag": "mine"}, "Question 1?", [" yes", " no", " Köln"]),
    ],
)
def test_a_yaml_of_lm_eval_is_read(
    tmp_path: Path, tokenizer: Tokenizer, fields: dict[str, Any], context: str, choices: list[str]
) -> None:
    metrics = [{"metric": "acc_norm", "aggregation": "mean"}, {"metric": "acc"}]
    requests = own_requests(read_task(write_yaml(tmp_path, metric_list=metrics, **fields)), tokenizer, 500)
    assert (requests.name, requests.metric) == ("own:plain", "len_norm")
    of_second = [pair for pair, at in zip(texts(requests, tokenizer), requests.documents, strict=True) if at == 1]
    assert of_second == [(context, choice) for choice in choices]
    assert requests.labels[requests.documents == 1].tolist() == [1] * len(choices)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"process_docs": "f"}, r"task\.yaml: process_docs is not read here"),
        ({"include": "x"}, r"include is not read here"),
        ({"output_type": "generate_until"}, r"output_type is generate_until; only multiple_choice"),
        ({"dataset_path": "allenai/sciq"}, r"dataset_path is allenai/sciq; only json"),
        ({"dataset_kwargs": {"data_dir": "x"}}, r"dataset_kwargs\.data_dir is not read"),
        ({"doc_to_target": None}, r"doc_to_target is missing"),
        ({"test_split": "dev"}, r"data_files has no dev, but test, train"),
        ({"num_fewshot": 1, "fewshot_split": None}, r"num_fewshot is set without fewshot_split"),
        ({"num_fewshot": 2}, r"has 1 examples to draw 2 from"),
        ({"metric_list": [{"metric": "exact_match"}]}, r"metric_list has exact_match; acc and acc_norm are read"),
        ({"doc_to_text": "{% if a %}b{% endif %}"}, r"q\.jsonl:1: doc_to_text has '{% if a"),
        ({"doc_to_text": "{{ context.upper() }}"}, r"doc_to_text has \{\{ context\.upper\(\) \}\}; of Jinja only"),
        ({"doc_to_text": "{{ nothing }}"}, r"q\.jsonl:1: it has no field nothing"),
        ({"doc_to_target": 3}, r"q\.jsonl:1: its answer is 3, neither one of the choices nor a number from 0 to 2"),
        ({"doc_to_choice": "context"}, r"its choices are no list of texts"),
        ({"doc_to_choice": ["", "b", "c"]}, r"q\.jsonl:1: its choice 0 \(from 0\) is empty; write a text"),
        ({"doc_to_target": "{{'²'}}"}, r"q\.jsonl:1: its answer is '²', neither one of the choices"),
        ({"test_split": ["test"]}, r"test_split is \['test'\]; it must be the name of a split"),
        ({"fewshot_split": {"a": 1}, "num_fewshot": 1}, r"fewshot_split is \{'a': 1\}; it must be the name"),
        ({"metric_list": [{"metric": ["acc"]}]}, r"metric_list has \['acc'\]; acc and acc_norm are read"),
        ({"description": "\ud800"}, r"task\.yaml: it has an unpaired surrogate"),
    ],
)
def test_what_is_not_plain_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        read_task(write_yaml(tmp_path, **fields))
    assert len(str(error.value).splitlines()) <= 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"q\.jsonl:2: it is not JSON"),
        ("[]", r"q\.jsonl:2: it is not a JSON object"),
        ('{"context": "a"}', r"q\.jsonl:2: it lacks choices, answer"),
        ('{"context": "a", "choices": ["b"], "answer": 0}', r"q\.jsonl:2: it has 1 choices"),
        ('{"context": "a", "choices": ["b", "c"], "answer": "d"}', r"q\.jsonl:2: its answer is 'd'"),
        ('{"context": 1, "choices": ["b", "c"], "answer": 0}', r"q\.jsonl:2: context is no text"),
        ('{"context": "\\ud800", "choices": ["b", "c"], "answer": 0}', r"q\.jsonl:2: it has an unpaired surrogate"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = write_lines(tmp_path / "q.jsonl", QUESTIONS[:1])
    file.write_text(file.read_text() + line)
    with pytest.raises(InputError, match=message):
        read_task(file)


def test_what_changes_a_figure_changes_the_sum_of_a_task(tmp_path: Path) -> None:
    """By which requests are kept in the cache."""

    def changed(**fields: Any) -> str:
        return read_task(write_yaml(tmp_path, **fields)).sha256

    first, second = ({"doc_to_choice": choices} for choices in ({"a": "yes", "b": "no"}, {"b": "no", "a": "yes"}))
    assert changed(**first, doc_to_target=0) != changed(**second, doc_to_target=0)
    path = write_yaml(tmp_path, num_fewshot=1)
    before = read_task(path)
    write_lines(tmp_path / "q.jsonl", QUESTIONS[:5])
    shots = (tmp_path / "shots.jsonl").read_text()
    (tmp_path / "shots.jsonl").write_text(json.dumps(QUESTIONS[5]) + "\n" + shots)
    assert before.sha256 != read_task(path).sha256


def test_two_files_of_one_task_are_refused(tmp_path: Path, small_tokenizer_file: Path) -> None:
    (tmp_path / "other").mkdir()
    files = [str(write_lines(folder / "trivia.jsonl", QUESTIONS)) for folder in (tmp_path, tmp_path / "other")]
    with pytest.raises(InputError, match=r"^two files of --tasks have a task named trivia; give one another name$"):
        prepare_requests(tmp_path / "a", tasks=files, tokenizer=small_tokenizer_file)


def test_a_function_in_a_yaml_is_not_run(tmp_path: Path) -> None:
    path = write_yaml(tmp_path)
    path.write_text("task: a\nprocess_docs: !function utils.process\n")
    with pytest.raises(InputError, match=r"is not a task of plain values .*!function"):
        read_task(path)


def test_a_request_file_holds_them_without_the_library(
    tmp_path: Path, small_tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_fanformer.evaluation.prepare.data_folder", lambda: pytest.fail("it is not needed"))
    file = write_lines(tmp_path / "trivia.jsonl", QUESTIONS)
    made = {"tasks": [str(file), str(write_yaml(tmp_path))], "tokenizer": small_tokenizer_file}
    report = prepare_requests(tmp_path / "a", **made, shots=1)
    assert [(task.name, task.documents, task.requests) for task in report.tasks] == [
        ("own:trivia", 6, 18),
        ("own:plain", 6, 18),
    ]
    read = read_requests(tmp_path / "a")
    assert list(read.tasks) == [task.name for task in resolve(["own:trivia", "own:plain"])]
    assert read.versions["own:trivia"].endswith(", 1 examples of seed 1234")
    for number, seed in enumerate((1, 2)):  # which draws nothing
        prepare_requests(tmp_path / str(number), tasks=[str(file)], tokenizer=small_tokenizer_file, seed=seed)
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()
    with pytest.raises(InputError, match="own:trivia is a task in a request file; name its file"):
        prepare_requests(tmp_path / "b", tasks=["own:trivia"], tokenizer=small_tokenizer_file)
