"""The request file: what a model is asked in each task, as token ids, with all that its scores need.

It is written once, where the tasks' data are (`evaluate --prepare`), and read wherever a model is scored, which needs
neither the data nor their library. It is a safetensors file: the arrays of a task as `TASK/ids` and so on, the rest as
JSON in its metadata, and a SHA-256 of everything in it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from megatron_fanformer.durable_files import regular_file, sha256_of, write_atomically
from megatron_fanformer.errors import CorruptError, InputError

FORMAT, VERSION = "megatron-fanformer requests", 1
LENGTHS = ("characters", "characters_no_space", "bytes", "bytes_no_space")
"""Of a continuation's text: `no_space` is without its first character, a space in nearly all tasks."""
ARRAYS = {
    "documents": np.int32,
    "choices": np.int32,
    "labels": np.int32,
    "ids": np.int32,
    "offsets": np.int64,
    "continuation_tokens": np.int32,
}
AGAIN = "write it again with `evaluate --prepare`"


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskRequests:
    """The n requests of one task, sorted by document, then choice.

    A request is a context and a continuation; what is asked is the log-probability of the continuation's tokens behind
    the context.
    """

    name: str
    metric: str
    """The task's default, by its name in `metrics.py`."""
    documents: np.ndarray
    """[n] int32: the document's number in the task."""
    choices: np.ndarray
    """[n] int32: which of its choices is asked about."""
    labels: np.ndarray
    """[n] int32: its right choice."""
    ids: np.ndarray
    """[tokens] int32: context, then continuation, one request after the other; at most the context length and one."""
    offsets: np.ndarray
    """[n + 1] int64: request i is ids[offsets[i]:offsets[i + 1]]."""
    continuation_tokens: np.ndarray
    """[n] int32: the last so many of a request's ids are its continuation."""
    lengths: dict[str, np.ndarray]
    """[n] int32 each, of the continuation's text, by the names in LENGTHS."""
    unconditional: "TaskRequests | None" = None
    """The same continuations behind the task's neutral context, for `pmi`."""
    cut: int = 0
    """Requests that lost the beginning of their context to the context length."""

    def __len__(self) -> int:
        return len(self.documents)


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestFile:
    """A request file, read and found whole."""

    path: Path
    sha256: str
    """Of the content: equal for equal requests."""
    tokenizer_sha256: str
    """Of the tokenizer's file, as in the manifests of token files."""
    context_length: int
    """Tokens that a model is given at most."""
    versions: dict[str, str]
    """Of the packages that made it."""
    tasks: dict[str, TaskRequests]
    texts: dict[str, list[dict[str, Any]]]
    """The documents of generation tasks, which are asked as text."""

    def selected(self, names: Sequence[str], *, limit: int | None = None) -> dict[str, TaskRequests]:
        """The named choice tasks, in the order of the names; of each the first `limit` documents.

        Raises:
            InputError: the file has not all of them; one line.
        """
        if absent := [name for name in names if name not in self.tasks]:
            there = ", ".join(self.tasks) or "no choice tasks"
            raise InputError(f"{self.path} has no requests of {', '.join(absent)}, but of {there}; {AGAIN} --tasks …")
        return {name: first_documents(self.tasks[name], limit) for name in names}

    def refuse_other_tokenizer(self, tokenizer: Path) -> None:
        """Raises InputError if the tokenizer's file is not the one that made the ids."""
        if (other := sha256_of(tokenizer)) != self.tokenizer_sha256:
            raise InputError(
                f"the requests in {self.path} were made with another tokenizer (SHA-256 {self.tokenizer_sha256[:12]}…) "
                f"than {tokenizer} (SHA-256 {other[:12]}…); {AGAIN} --tokenizer {tokenizer}"
            )


def first_documents(requests: TaskRequests, limit: int | None) -> TaskRequests:
    """The requests of a task's first `limit` documents; None: all. `cut` stays that of all."""
    numbers = np.unique(requests.documents)
    if limit is None or limit >= len(numbers):
        return requests
    count = int(np.searchsorted(requests.documents, numbers[limit]))
    return replace(
        requests,
        documents=requests.documents[:count],
        choices=requests.choices[:count],
        labels=requests.labels[:count],
        ids=requests.ids[: requests.offsets[count]],
        offsets=requests.offsets[: count + 1],
        continuation_tokens=requests.continuation_tokens[:count],
        lengths={name: values[:count] for name, values in requests.lengths.items()},
        unconditional=requests.unconditional and first_documents(requests.unconditional, limit),
    )


def cut_to_context(requests: TaskRequests, context_length: int) -> TaskRequests:
    """The requests, each of at most `context_length` ids and one more: a model is given all but the last id.

    Contexts lose their beginning, as in ai2-olmo-eval; `cut` counts the requests that lost something.

    Raises:
        InputError: a continuation alone is longer than the context length.
    """
    longest = int(requests.continuation_tokens.max(initial=0))
    if longest > context_length:
        raise InputError(
            f"task {requests.name} has a continuation of {longest} tokens, more than the context length "
            f"{context_length}; choose one of {longest} or more, or leave the task out"
        )
    lengths = np.diff(requests.offsets)
    kept = np.minimum(lengths, context_length + 1)
    unconditional = requests.unconditional and cut_to_context(requests.unconditional, context_length)
    if not (cut := int(np.count_nonzero(kept < lengths))):
        return replace(requests, unconditional=unconditional)
    from_end = np.repeat(requests.offsets[1:], lengths) - np.arange(len(requests.ids))
    return replace(
        requests,
        ids=requests.ids[from_end <= np.repeat(kept, lengths)],
        offsets=np.concatenate([[0], np.cumsum(kept)]),
        unconditional=unconditional,
        cut=cut,
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
    """Write a request file atomically; returns its SHA-256. Equal requests give equal bytes.

    Raises:
        OSError: it cannot be written.
    """
    content = {
        "version": VERSION,
        "tokenizer_sha256": tokenizer_sha256,
        "context_length": context_length,
        "versions": dict(versions),
        "tasks": {name: {"metric": task.metric, "cut": _cuts(task)} for name, task in tasks.items()},
        "texts": list(texts),
    }
    arrays = {name: array for task in tasks.values() for name, array in _arrays(task).items()}
    for name, documents in texts.items():
        arrays[f"{name}/texts"] = np.frombuffer(json.dumps(documents, ensure_ascii=False).encode(), np.uint8)
    told = json.dumps(content, ensure_ascii=False)
    digest = _digest(told, arrays)
    # Under one name: safetensors writes several in any order.
    write_atomically(path, safetensors.numpy.save(arrays, {FORMAT: f"{digest} {told}"}))
    return digest


def _cuts(task: TaskRequests) -> list[int]:
    return [task.cut] + ([task.unconditional.cut] if task.unconditional else [])


def _arrays(task: TaskRequests) -> dict[str, np.ndarray]:
    """The task's arrays by their names in the file; of the unconditional requests what differs."""
    arrays = {f"{task.name}/{name}": getattr(task, name).astype(kind) for name, kind in ARRAYS.items()}
    arrays |= {f"{task.name}/{name}": task.lengths[name].astype(np.int32) for name in LENGTHS}
    if task.unconditional:
        arrays[f"{task.name}/unconditional/ids"] = task.unconditional.ids.astype(np.int32)
        arrays[f"{task.name}/unconditional/offsets"] = task.unconditional.offsets.astype(np.int64)
    return arrays


def _digest(content: str, arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of the content and of all arrays with their names, types and shapes."""
    digest = hashlib.sha256(content.encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"\0{name} {array.dtype.str} {array.shape}\0".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def read_requests(path: Path) -> RequestFile:
    """Read a request file and hold it against its SHA-256.

    Raises:
        InputError: there is no such file, it is something else, or of another version.
        CorruptError: it is damaged.
    """
    try:
        with safetensors.safe_open(regular_file(path), framework="numpy") as stream:
            metadata = stream.metadata() or {}
            arrays = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118 - not a mapping
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error}); name a request file") from None
    except (safetensors.SafetensorError, ValueError, TypeError) as error:
        raise CorruptError(f"{path} is not a whole request file ({error}); {AGAIN}, or copy it again") from None
    if FORMAT not in metadata:
        raise InputError(f"{path} is not a request file; {AGAIN}")
    sha256, _, told = metadata[FORMAT].partition(" ")
    if _digest(told, arrays) != sha256:
        raise CorruptError(
            f"{path} is damaged: its content has another SHA-256 than it states; {AGAIN}, or copy it again"
        )
    try:
        content = json.loads(told)
        if (version := content["version"]) == VERSION:
            return _request_file(path, sha256, content, arrays)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CorruptError(f"{path} is not as `evaluate --prepare` writes it ({error}); {AGAIN}") from None
    raise InputError(f"{path} is a request file of version {version!s:.20}, this program's is {VERSION}; {AGAIN}")


def _request_file(path: Path, sha256: str, content: Any, arrays: dict[str, np.ndarray]) -> RequestFile:
    return RequestFile(
        path=path,
        sha256=sha256,
        tokenizer_sha256=content["tokenizer_sha256"],
        context_length=int(content["context_length"]),
        versions=dict(content["versions"]),
        tasks={name: _task(name, stated, arrays) for name, stated in content["tasks"].items()},
        texts={name: json.loads(arrays[f"{name}/texts"].tobytes()) for name in content["texts"]},
    )


def _task(name: str, stated: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> TaskRequests:
    cuts = [int(cut) for cut in stated["cut"]]
    task = TaskRequests(
        name=name,
        metric=str(stated["metric"]),
        documents=arrays[f"{name}/documents"],
        choices=arrays[f"{name}/choices"],
        labels=arrays[f"{name}/labels"],
        ids=arrays[f"{name}/ids"],
        offsets=arrays[f"{name}/offsets"],
        continuation_tokens=arrays[f"{name}/continuation_tokens"],
        lengths={length: arrays[f"{name}/{length}"] for length in LENGTHS},
        cut=cuts[0],
    )
    _refuse_disorder(task)
    if len(cuts) == 1:
        return task
    ids, offsets = arrays[f"{name}/unconditional/ids"], arrays[f"{name}/unconditional/offsets"]
    unconditional = replace(task, ids=ids, offsets=offsets, cut=cuts[1])
    _refuse_disorder(unconditional)
    return replace(task, unconditional=unconditional)


def _refuse_disorder(task: TaskRequests) -> None:
    """Raises ValueError if the arrays do not fit one another; a forged file has the right SHA-256."""
    n = len(task.documents)
    of_requests = [task.documents, task.choices, task.labels, task.continuation_tokens, *task.lengths.values()]
    fits = (
        n > 0
        and all(array.shape == (n,) and array.dtype == np.int32 and array.min() >= 0 for array in of_requests)
        and task.offsets.shape == (n + 1,)
        and task.ids.dtype == np.int32
        and task.offsets[0] == 0
        and task.offsets[-1] == len(task.ids)
        and (np.diff(task.offsets) > task.continuation_tokens).all()
        and task.ids.min() >= 0
        and (np.diff(task.documents) >= 0).all()
    )
    if fits:
        starts = np.flatnonzero(np.diff(task.documents, prepend=-1))
        fits = (np.add.reduceat(task.labels == task.choices, starts, dtype=np.int64) == 1).all()
    if not fits:
        raise ValueError(f"the arrays of task {task.name} do not fit one another")
