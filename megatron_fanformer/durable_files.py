"""Writes files and folders that exist completely or not at all, even after a power failure; sums and locks files.

A file is written under a hidden name (`.NAME.PROCESS.tmp`), flushed to the disk and renamed; then the folder that lists
the file is flushed, too. A process that is killed leaves at most the hidden file or folder.

Call `regular_file` before opening any file that somebody else may have written: opening a pipe waits for ever.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megatron_fanformer.errors import InputError

READ_BYTES = 1 << 20  # per read for a SHA-256
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of `flock` on a file system without locks; there, locking is skipped."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Errors of writing to a full file system, or beyond the user's quota."""


def regular_file(path: Path, *, most_bytes: int | None = None) -> Path:
    """Check that a path is a regular file, and return the path.

    Raises OSError if the path does not exist, is a folder, a pipe, a socket or a device, or has over `most_bytes`.
    """
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, not a file", str(path))
    if most_bytes is not None and status.st_size > most_bytes:
        raise OSError(errno.EFBIG, f"it has {status.st_size} bytes, more than the {most_bytes} allowed", str(path))
    return path


def write_atomically(path: Path, content: str | bytes, *, aside: Path | None = None) -> None:
    """Write or replace a small file atomically, by renaming a hidden file in `aside`, by default the file's folder."""
    partial = temporary_name((aside or path.parent) / path.name)
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def file_problems(**options: Path | None) -> list[str]:
    """Return one line for each option that names a folder, or a file in a folder that does not exist."""
    return [
        f"--{name} {path} is not a file in a folder that exists; create the folder, or name another"
        for name, path in options.items()
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir())
    ]


def publish(partial: Path, path: Path) -> None:
    """Flush a complete file or folder to the disk, and rename it to `path`; an existing file is replaced."""
    for folder, _, names in os.walk(partial):  # which yields nothing for a file
        for name in names:
            sync(Path(folder, name))
        sync(Path(folder))
    if partial.is_file():
        sync(partial)
    os.replace(partial, path)
    sync(path.parent)


def temporary_name(path: Path) -> Path:
    """Return a hidden name beside a path, unique among the processes that run."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """Yield a new folder to fill. It is renamed to `destination` when the block ends, and removed if the block fails.

    Raises InputError if `destination` already exists.
    """
    if destination.exists():
        raise InputError(f"{destination} already exists; name another destination, or remove it")
    partial = temporary_name(destination)
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process with the same id: in containers, ids repeat
    partial.mkdir(parents=True)
    try:
        yield partial
        publish(partial, destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Add `path` to an OSError that names no path, such as an error of reading or writing an open file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with naming(path), regular_file(path).open("rb") as stream:
        return sha256_of_stream(stream)


def sha256_of_stream(stream: BinaryIO) -> str:
    """Return the hexadecimal SHA-256 of the rest of an open file."""
    digest = hashlib.sha256()
    while block := stream.read(READ_BYTES):
        digest.update(block)
    return digest.hexdigest()


def take_lock(path: Path, *, wait: bool) -> int | None:
    """Lock a file, which is created if missing, and return a descriptor that holds the lock until it is closed.

    If another process holds the lock, wait for it, or return None if `wait` is false.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in NO_LOCKS:
                return descriptor
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                return None
            raise
        # The previous holder may have removed the file after it was opened here: then a lock on it keeps nobody out.
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
        os.close(descriptor)
        if not wait:  # else open the file that is there now
            return None
