"""The folder in which megatron-core keeps a dataset's sample indices, made safe.

megatron-core builds the indices on rank 0, writes them file by file under their final names, and takes them
for whole as soon as all names exist; the names do not depend on the data. Three things can go wrong with
that, and are met here: two jobs write at once (a lock), a job dies in the middle (a mark that stands while it
writes), the data under a prefix are replaced (a fingerprint that goes into the names).
"""

import errno
import fcntl
import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch.distributed as dist

from megatron_fanformer.data.token_files import idx_path
from megatron_fanformer.errors import InputError

FINGERPRINT_BLOCKS = 16
FINGERPRINT_BLOCK_BYTES = 1 << 16
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def fingerprint(prefixes: Sequence[str]) -> str:
    """Changes when the documents' lengths change, which is all that sample indices depend on.

    Of a large index, blocks at even distances are read: its byte offsets are running sums, so that a change
    of one length shows in all that follow.
    """
    digest = hashlib.sha256()
    for prefix in prefixes:
        path = idx_path(prefix)
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as stream:
            for block in range(FINGERPRINT_BLOCKS):
                stream.seek(max(0, size - FINGERPRINT_BLOCK_BYTES) * block // (FINGERPRINT_BLOCKS - 1))
                digest.update(stream.read(FINGERPRINT_BLOCK_BYTES))
    return digest.hexdigest()


@contextmanager
def building_in(folder: Path) -> Iterator[None]:
    """Around the building of datasets whose indices go to `folder`; to be entered by every rank.

    Rank 0, which alone writes, holds the folder's lock meanwhile. Raises InputError where the folder cannot
    be written, or where a rank does not see what rank 0 wrote.
    """
    if dist.is_initialized() and dist.get_rank() != 0:
        with _same_folder_on_all_nodes(folder):
            yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise InputError(
            f"index cache {folder} cannot be written ({error.strerror}): set data.cache_path to another"
        ) from error
    try:
        with _marked(folder) if _locked(lock) else nullcontext(), _process_group():
            yield
    finally:
        os.close(lock)


def _locked(descriptor: int) -> bool:
    """Wait for the lock; False on a file system without locks, which is left to one job at a time."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno in NO_LOCKS:
            return False
        raise
    return True


@contextmanager
def _marked(folder: Path) -> Iterator[None]:
    """Set a mark while files are written; one found standing is that of a job that died writing."""
    mark = folder / ".building"
    if mark.exists():
        begun = mark.stat().st_mtime_ns
        for path in folder.iterdir():
            if path.suffix in (".npy", ".txt") and path.stat().st_mtime_ns >= begun:
                path.unlink()
    mark.touch()
    yield
    mark.unlink()


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
            f"{error.filename} was written by rank 0 and is not to be seen by rank {dist.get_rank()}:"
            f" set data.cache_path to a folder that all nodes share (now {folder})"
        ) from error
