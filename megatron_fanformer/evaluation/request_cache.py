"""Requests that `evaluate` prepares by itself, kept in this user's cache by the SHA-256 of all that they come from."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_fanformer import __version__
from megatron_fanformer.data.tokenizer import tokenizer_file
from megatron_fanformer.durable_files import sha256_of
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.evaluation.own_tasks import OwnTask
from megatron_fanformer.evaluation.prepare import (
    CONTEXT_LENGTH,
    PreparedTask,
    data_folder,
    library_version,
    prepare_requests,
    read_own_tasks,
)
from megatron_fanformer.evaluation.requests import read_requests
from megatron_fanformer.evaluation.tasks import is_own, resolve
from megatron_fanformer.runtime.device import cache_folder


def check_tasks(tasks: Sequence[str]) -> list[OwnTask]:
    """Return the tasks of one's own, once it is known that the data of all tasks are here; prepares nothing.

    Raises:
        InputError: a task is unknown, its file cannot be read, or the library of the others is not installed.
    """
    own = read_own_tasks(tasks)
    if resolve([name for name in tasks if not is_own(name)]):
        data_folder()
    return own


def cached_requests(
    tasks: Sequence[str],
    tokenizer: Path,
    *,
    eod_id: int | None = None,
    context_length: int | None = None,
    limit: int | None = None,
    on_task: Callable[[PreparedTask], None] | None = None,
) -> Path:
    """Return the request file of tasks, prepared now if the cache does not have it; the arguments are those of
    `prepare_requests`, where None stands for its defaults.

    Raises:
        InputError: as `prepare_requests`.
        OSError: the cache cannot be written.
    """
    own = check_tasks(tasks)
    context_length = CONTEXT_LENGTH if context_length is None else context_length
    names = [task.name for task in resolve([name for name in tasks if not is_own(name)])]
    made_of = {
        "tasks": names,
        "own": [[task.name, task.sha256] for task in own],
        "tokenizer": sha256_of(tokenizer_file(tokenizer)),
        "eod_id": eod_id,
        "context_length": context_length,
        "limit": limit,
        "versions": [__version__, library_version() if names else None],
    }
    key = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
    path = cache_folder() / "requests" / f"{key}.safetensors"
    if path.is_file() and _is_whole(path):
        return path
    try:
        prepare_requests(
            path,
            tasks=tasks,
            tokenizer=tokenizer,
            eod_id=eod_id,
            context_length=context_length,
            limit=limit,
            on_task=on_task,
        )
    except InputError:
        if not path.is_file():  # else another process has written it meanwhile
            raise
    return path


def _is_whole(path: Path) -> bool:
    """Return whether a cached file can be read; one that cannot, or is of another version, is removed."""
    try:
        read_requests(path)
    except (CorruptError, InputError):
        path.unlink(missing_ok=True)
        return False
    return True
