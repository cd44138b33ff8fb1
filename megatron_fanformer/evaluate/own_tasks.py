"""Choice tasks of one's own: JSON lines of questions, each with its choices and its answer.

A space stands between context and choice, but where there is white space. Tokens and metrics are lm-eval's: white space
that ends a context goes to the continuation, and both are encoded together.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from megatron_fanformer.data.tokenizer import Tokenizer
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.requests import TaskRequests, cut_to_context, make_requests
from megatron_fanformer.evaluate.tasks import OWN

MOST_BYTES = 1 << 30


class Question(msgspec.Struct):
    """A line; other fields of it are not read."""

    context: str
    # the score of an empty choice by its length would be infinite
    choices: Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=2)]
    answer: int | str
    """The number of the right choice, from 0, or its text."""


@dataclass(frozen=True, kw_only=True)
class OwnTask:
    """A task that was read; each question's answer is a number."""

    name: str
    questions: list[Question]
    sha256: str
    """SHA-256 of its file."""


def read_task(path: Path) -> OwnTask:
    """Read a task.

    Raises:
        InputError: it cannot be read, or a line is no question.
    """
    try:
        content = regular_file(path, most_bytes=MOST_BYTES).read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); name a file of JSON lines") from None
    if not re.fullmatch(r"[\w.-]+", path.stem):
        raise InputError(f"{path} makes a task named {path.stem!r}; use letters, digits, '.', '_' and '-'")
    questions = []
    decode = msgspec.json.Decoder(Question).decode
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            question = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(
                f"{path}:{number}: it is no question ({error}); write an object with context, choices and answer"
            ) from None
        if question.answer in question.choices:
            question.answer = question.choices.index(str(question.answer))
        if isinstance(question.answer, str) or not 0 <= question.answer < len(question.choices):
            raise InputError(
                f"{path}:{number}: its answer is {question.answer!r}; write one of the choices, or a number from 0 to "
                f"{len(question.choices) - 1}"
            )
        questions.append(question)
    if not questions:
        raise InputError(f"{path} has no lines; write a question on each")
    return OwnTask(name=path.stem, questions=questions, sha256=hashlib.sha256(content).hexdigest())


def own_requests(task: OwnTask, tokenizer: Tokenizer, context_length: int, *, limit: int | None = None) -> TaskRequests:
    """Return the requests of a task, or of its first `limit` questions; an end of text stands for an empty context.

    Raises:
        InputError: a choice is longer than the context, or no token of its own.
    """
    texts, lengths, places = [], [], []
    for number, question in enumerate(task.questions[:limit]):
        for choice, text in enumerate(question.choices):
            between = "" if question.context[-1:].isspace() or text[:1].isspace() else " "
            whole = between + text
            bare = whole[whole[:1].isspace() :]
            texts += [question.context.rstrip(), question.context + whole]
            lengths.append((len(whole), len(bare), len(whole.encode()), len(bare.encode())))
            places.append((number, choice, int(question.answer)))
    encoded = tokenizer.encode_batch(texts)
    contexts = encoded[::2]
    continuations = [whole[len(context) :] for context, whole in zip(contexts, encoded[1::2], strict=True)]
    for continuation, (number, choice, _) in zip(continuations, places, strict=True):
        if not continuation:
            raise InputError(
                f"question {number} (from 0) of task {task.name} has the choice "
                f"{task.questions[number].choices[choice]!r}, which is no token of its own; give it a text"
            )
    contexts = [context or [tokenizer.eod_id] for context in contexts]
    requests = make_requests(OWN + task.name, "acc", places, contexts, continuations, lengths)
    return cut_to_context(requests, context_length)
