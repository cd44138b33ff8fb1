"""The folder in which megatron-core keeps a dataset's sample indices, made safe.

megatron-core builds the indices on rank 0, writes them file by file under their final names, assumes that they are
complete as soon as all names exist, and loads whatever is in them, including pickled objects; the names do not depend
on the data. So each dataset has its own folder here, named after everything that its indices depend on, including the
documents' lengths. When the indices are complete, their sizes are recorded; what a dead job left half-written, or what
was truncated since, is rebuilt.
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fanformer.durable_files import take_lock, write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.runtime.agreement import is_main, on_main

logger = logging.getLogger(__name__)

COMPLETE = "complete.json"


@contextmanager
def indices_in(cache: Path, identity: Any) -> Iterator[Path]:
    """Yield the folder for the indices of a dataset, while it is being built; to be entered by every rank.

    `identity` is all that they depend on, as plain JSON values. Rank 0, the only one that writes, holds the cache's
    lock meanwhile. Raises InputError on every rank if the cache cannot be written, and on a rank that does not see
    the files of rank 0.
    """
    folder = cache / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    locks: list[int] = []  # on rank 0: the cache's
    try:
        is_whole = on_main(lambda: _made_ready(cache, folder, locks))
        with _process_group() if is_main() else _same_folder_on_all_nodes(cache):
            yield folder
        if not is_whole:
            on_main(lambda: write_atomically(folder / COMPLETE, json.dumps(_sizes(folder))))
    finally:
        for lock in locks:
            os.close(lock)


def _made_ready(cache: Path, folder: Path, locks: list[int]) -> bool:
    """Take the cache's lock, and keep a complete folder or leave an empty one; returns whether it is complete."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = take_lock(cache / ".lock", wait=False)
        if lock is None:
            logger.info("index cache %s: waiting for another job that builds in it", cache)
            lock = take_lock(cache / ".lock", wait=True)
    except OSError as error:
        raise InputError(
            f"index cache {cache} cannot be written ({error.strerror}); set data.cache_path to another"
        ) from error
    assert lock is not None
    locks.append(lock)
    is_whole = _is_whole(folder)
    if folder.exists() and not is_whole:
        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)
    logger.debug("sample indices in %s: %s", folder, "complete, reused" if is_whole else "to be built")
    return is_whole


def _is_whole(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / COMPLETE).read_bytes()) == _sizes(folder))
    except (OSError, ValueError):
        return False


def _sizes(folder: Path) -> dict[str, int]:
    """Return the size of each file, by its name."""
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file() and COMPLETE not in path.name}


@contextmanager
def _process_group() -> Iterator[None]:
    """Give a process without ranks a group of its own: megatron-core 0.16's blends ask for their rank."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _same_folder_on_all_nodes(folder: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(
            f"{error.filename} was written by rank 0 and is not visible to rank {dist.get_rank()};"
            f" set data.cache_path to a folder that all nodes share (now {folder})"
        ) from error
