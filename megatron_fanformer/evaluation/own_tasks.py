"""Choice tasks of one's own: a JSON lines file of questions, or lm-eval's YAML of a task on local JSON lines.

Contexts, examples, their draw, tokens and metrics are lm-eval's, so that a task gives the same figures there and here:
examples come from `random.Random(seed).sample`, one document after another, without the document itself; white space
that ends a context goes to the continuation, and both are encoded together.
"""

import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_fanformer.configuration import read_plain_values
from megatron_fanformer.data.tokenizer import Tokenizer
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluation.requests import LENGTHS, TaskRequests, cut_to_context
from megatron_fanformer.evaluation.task_templates import as_choices, as_target, as_text
from megatron_fanformer.evaluation.tasks import OWN

FEWSHOT_SEED = 1234  # lm-eval's
MOST_BYTES = 1 << 30
METRICS = {"acc": "acc", "acc_norm": "len_norm"}
"""Our names of lm-eval's metrics."""
READ = (
    *("task", "dataset_path", "dataset_kwargs", "test_split", "validation_split", "training_split", "fewshot_split"),
    *("output_type", "doc_to_text", "doc_to_choice", "doc_to_target", "num_fewshot", "description", "target_delimiter"),
    *("fewshot_delimiter", "metric_list"),
)
NO_MATTER = ("task_alias", "tag", "metadata")
"""Fields of lm-eval that change no figure."""


class Question(NamedTuple):
    """One document."""

    stated: dict[str, Any]
    """Its line."""
    text: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, kw_only=True)
class OwnTask:
    """A task that was read."""

    name: str
    questions: tuple[Question, ...]
    examples: tuple[Question, ...]
    """What few-shot examples are drawn from."""
    of_same_split: bool
    """Whether these are the questions themselves: none is an example of its own."""
    metric: str = "acc"
    shots: int = 0
    description: str = ""
    delimiter: str | None = None
    """What is between a text and a choice; None: a space, but where there is white space."""
    example_delimiter: str = "\n\n"
    sha256: str
    """SHA-256 of the files it was read from."""

    def between(self, question: Question, choice: str) -> str:
        """Return what stands between a question's text and a choice."""
        if self.delimiter is not None:
            return self.delimiter
        return "" if question.text[-1:].isspace() or choice[:1].isspace() else " "


def read_task(path: Path, shots: int | None = None) -> OwnTask:
    """Read a task.

    Args:
        shots: few-shot examples; None: as the YAML says, none for JSON lines.

    Raises:
        InputError: it cannot be read, a field or a line is not as it must be, or there are too few examples.
    """
    task = _of_json_lines(path, shots or 0) if path.suffix == ".jsonl" else _of_yaml(path, shots)
    if not re.fullmatch(r"[\w.-]+", task.name):
        raise InputError(f"{path} makes a task named {task.name!r}; use letters, digits, '.', '_' and '-'")
    if task.shots > len(task.examples) - task.of_same_split:
        raise InputError(
            f"{path} has {len(task.examples)} examples to draw {task.shots} from"
            f"{', without the question itself' if task.of_same_split else ''}; take fewer"
        )
    return task


def own_requests(
    task: OwnTask, tokenizer: Tokenizer, context_length: int, *, limit: int | None = None, seed: int = FEWSHOT_SEED
) -> TaskRequests:
    """Return the requests of a task, or of its first `limit` questions.

    Raises:
        InputError: a choice is longer than the context, or no token of its own.
    """
    drawn = random.Random(seed)
    pairs: list[tuple[str, str]] = []
    lengths, documents, choices, labels = [], [], [], []
    for number, question in enumerate(task.questions[:limit]):
        context = task.description + "".join(
            f"{shot.text}{task.between(shot, shot.choices[shot.answer])}{shot.choices[shot.answer]}"
            f"{task.example_delimiter}"
            for shot in _examples(task, question, drawn)
        )
        for choice, text in enumerate(question.choices):
            between = task.between(question, text)
            pairs.append(_split(context + question.text, between + text))
            bare = text if between or not text[:1].isspace() or task.delimiter is not None else text[1:]
            whole = between + text
            lengths.append((len(whole), len(bare), len(whole.encode()), len(bare.encode())))
            documents.append(number)
            choices.append(choice)
            labels.append(question.answer)
    rows = [_encoded(task, tokenizer, documents[row], pair) for row, pair in enumerate(pairs)]
    ids = [[*context, *continuation] for context, continuation in rows]
    requests = TaskRequests(
        name=OWN + task.name,
        metric=task.metric,
        documents=np.array(documents, np.int32),
        choices=np.array(choices, np.int32),
        labels=np.array(labels, np.int32),
        ids=np.array([each for row in ids for each in row], np.int32),
        offsets=np.cumsum([0, *map(len, ids)], dtype=np.int64),
        continuation_tokens=np.array([len(continuation) for _, continuation in rows], np.int32),
        cut_tokens=np.zeros(len(rows), np.int32),
        lengths=dict(zip(LENGTHS, np.array(lengths, np.int32).T, strict=True)),
    )
    return cut_to_context(requests, context_length)


def _examples(task: OwnTask, question: Question, drawn: random.Random) -> Sequence[Question]:
    """Return the examples before a question, as lm-eval's `ContextSampler.sample` draws them."""
    if not task.shots:
        return ()
    if not task.of_same_split:
        return drawn.sample(task.examples, task.shots)
    found = [each for each in drawn.sample(task.examples, task.shots + 1) if each.stated != question.stated]
    if len(found) >= task.shots:
        return found[: task.shots]
    others = [each for each in task.examples if each.stated != question.stated]
    if len(others) < task.shots:
        raise InputError(
            f"task {task.name} has {len(others)} examples that differ from {question.text[:40]!r}, of which "
            f"{task.shots} are to be drawn; take fewer"
        )
    return drawn.sample(others, task.shots)


def _split(context: str, continuation: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def _encoded(task: OwnTask, tokenizer: Tokenizer, number: int, pair: tuple[str, str]) -> tuple[list[int], list[int]]:
    """Return the ids of context and continuation; an end of text stands for an empty context."""
    context, continuation = pair
    if not context:
        before, after = [tokenizer.eod_id], tokenizer.encode(continuation)
    else:
        before, whole = tokenizer.encode_batch([context, context + continuation])
        after = whole[len(before) :]
    if not after:
        raise InputError(
            f"question {number} (from 0) of task {task.name} has the choice {continuation!r}, which is no token of its "
            "own; give it a text"
        )
    return before, after


# -- files


def _lines(path: Path) -> tuple[list[dict[str, Any]], bytes]:
    """Return the objects of a JSON lines file, and its content."""
    try:
        content = regular_file(path, most_bytes=MOST_BYTES).read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); name a file of JSON lines") from None
    found = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number}: it is not JSON ({error}); write one object on each line") from None
        if not isinstance(value, dict):
            raise InputError(f"{path}:{number}: it is not a JSON object; write one on each line")
        if b"\\u" in line:
            _refuse_surrogates(f"{path}:{number}", value)
        found.append({**value, LINE: number})
    if not found:
        raise InputError(f"{path} has no lines; write one object on each")
    return found, content


def _refuse_surrogates(place: str, value: Any) -> None:
    if isinstance(value, dict):
        for each in value.items():
            _refuse_surrogates(place, list(each))
    elif isinstance(value, list):
        for each in value:
            _refuse_surrogates(place, each)
    elif isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise InputError(f"{place}: it has an unpaired surrogate, which no tokenizer takes; remove it")


LINE = "\0line"  # no field of a JSON line that anybody wrote


def _questions(path: Path, lines: Sequence[dict[str, Any]], fields: Mapping[str, Any]) -> tuple[Question, ...]:
    columns = {name for line in lines for name in line} - {LINE}
    found = []
    for stated in lines:
        line = {name: value for name, value in stated.items() if name != LINE}
        try:
            text = as_text(fields["doc_to_text"], line, columns)
            choices = as_choices(fields["doc_to_choice"], line, columns)
            answer = as_target(fields["doc_to_target"], line, columns, choices)
        except ValueError as error:
            raise InputError(f"{path}:{stated[LINE]}: {error}") from None
        found.append(Question(line, text, tuple(choices), answer))
    return tuple(found)


def _of_json_lines(path: Path, shots: int) -> OwnTask:
    lines, content = _lines(path)
    fields = {"doc_to_text": "context", "doc_to_choice": "choices", "doc_to_target": "answer"}
    for line in lines:
        if missing := [name for name in fields.values() if name not in line]:
            raise InputError(
                f"{path}:{line[LINE]}: it lacks {', '.join(missing)}; a question has context, choices and answer"
            )
    questions = _questions(path, lines, fields)
    sha256 = hashlib.sha256(content).hexdigest()
    return OwnTask(
        name=path.stem, questions=questions, examples=questions, of_same_split=True, shots=shots, sha256=sha256
    )


def _of_yaml(path: Path, shots: int | None) -> OwnTask:
    try:
        values = read_plain_values(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); name a task's YAML or JSON lines") from None
    except ValueError as error:
        raise InputError(f"{path} is not a task of plain values ({error}); write its texts as fields") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} is no task of lm-eval; it must have fields such as task and doc_to_text")
    _refuse_surrogates(str(path), values)
    if shots is not None:
        values["num_fewshot"] = shots
    if problems := _problems(values):
        raise InputError("\n".join(f"{path}: {problem}" for problem in problems))
    evaluated = values.get("test_split") or values["validation_split"]
    count = values.get("num_fewshot") or 0
    files = {name: [path.parent / each for each in paths] for name, paths in _data_files(values).items()}
    digest = hashlib.sha256(repr(values).encode())  # in its order, which is that of choices by name
    read: dict[str, tuple[Question, ...]] = {}
    for split in dict.fromkeys([evaluated, *([values["fewshot_split"]] if count else [])]):
        if split not in files:
            raise InputError(f"{path}: dataset_kwargs.data_files has no {split}, but {', '.join(files)}; name its file")
        read[split] = ()
        for file in files[split]:
            lines, content = _lines(file)
            digest.update(hashlib.sha256(content).digest())  # a line that moves to another file changes it
            read[split] += _questions(file, lines, values)
    metrics = [METRICS[each["metric"]] for each in values.get("metric_list") or [{"metric": "acc"}]]
    examples = values["fewshot_split"] if count else evaluated
    return OwnTask(
        name=str(values["task"]),
        questions=read[evaluated],
        examples=read[examples],
        of_same_split=examples == evaluated,
        metric=metrics[0],
        shots=count,
        description=values.get("description") or "",
        delimiter=values.get("target_delimiter", " "),
        example_delimiter=values.get("fewshot_delimiter", "\n\n"),
        sha256=digest.hexdigest(),
    )


def _data_files(values: Mapping[str, Any]) -> dict[str, list[str]]:
    stated = values["dataset_kwargs"]["data_files"]
    by_split = stated if isinstance(stated, dict) else {"train": stated}
    return {str(split): [paths] if isinstance(paths, str) else list(paths) for split, paths in by_split.items()}


def _problems(values: Mapping[str, Any]) -> list[str]:
    """Return what keeps a task of lm-eval from being read here, each by its field."""
    found = [
        f"{name} is not read here; leave it out, or write the questions as JSON lines"
        for name in values
        if name not in READ and name not in NO_MATTER
    ]
    for name in ("test_split", "validation_split", "fewshot_split"):
        if not isinstance(values.get(name), str | None):
            found.append(f"{name} is {values[name]}; it must be the name of a split")
    for name in ("task", "doc_to_text", "doc_to_choice", "doc_to_target"):
        if values.get(name) is None:
            found.append(f"{name} is missing; state it")
    if values.get("output_type") != "multiple_choice":
        found.append(f"output_type is {values.get('output_type')}; only multiple_choice is read here")
    if values.get("dataset_path") != "json":
        found.append(f"dataset_path is {values.get('dataset_path')}; only json, of local files, is read here")
    kwargs = values.get("dataset_kwargs")
    others = [name for name in kwargs if name != "data_files"] if isinstance(kwargs, dict) else []
    if others:
        found.append(f"dataset_kwargs.{', dataset_kwargs.'.join(map(str, others))} is not read here; leave it out")
    if not isinstance(kwargs, dict) or not _are_files(kwargs.get("data_files")):
        found.append("dataset_kwargs.data_files must name a file, or several, of each split; state them")
    if not (values.get("test_split") or values.get("validation_split")):
        found.append("neither test_split nor validation_split is stated; name the questions' split")
    shots = values.get("num_fewshot")
    if shots is not None and (type(shots) is not int or shots < 0):
        found.append(f"num_fewshot is {shots}; it must be a number from 0")
    elif shots and not values.get("fewshot_split"):
        found.append("num_fewshot is set without fewshot_split; name the split of the examples")
    for name in ("description", "target_delimiter", "fewshot_delimiter"):
        text = values.get(name, "")
        if not isinstance(text, str) or "{{" in text or "{%" in text:
            found.append(f"{name} is no plain text; write it without Jinja")
    metrics = values.get("metric_list") or []
    if not isinstance(metrics, list) or not all(isinstance(each, dict) and "metric" in each for each in metrics):
        return [*found, "metric_list is no list of objects with a metric; write it so, or leave it out"]
    found += [
        f"metric_list has {each['metric']}; {' and '.join(METRICS)} are read here"
        for each in metrics
        if not isinstance(each["metric"], str) or each["metric"] not in METRICS
    ]
    return found


def _are_files(stated: Any) -> bool:
    if isinstance(stated, dict):
        return bool(stated) and all(_are_files(each) and not isinstance(each, dict) for each in stated.values())
    if isinstance(stated, list):
        return bool(stated) and all(isinstance(each, str) for each in stated)
    return isinstance(stated, str)
