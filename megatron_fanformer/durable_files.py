"""Files and folders that exist completely or not at all, even after a power failure; their hashes, and locks.

`regular_file` stands before every opening of a file that somebody else may have written: opening a pipe waits for ever.

A file gets its name once it is on the disk: it is flushed, renamed, and the folder that now names it flushed too. A
process that is killed leaves at most a hidden file or folder (`.NAME.PROCESS.tmp`).
"""

import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_fanformer.errors import InputError

READ_BYTES = 1 << 20
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""The errors of a file system without locks; there, locking is skipped."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""The errors of a full file system, or of a user's full share of it."""


def at_home(value: Any) -> Any:
    """Return a value whose texts have the home directory for `~/`, which no shell replaces in YAML or in quotes."""
    if isinstance(value, str) and value.startswith("~/"):
        return os.path.expanduser(value)
    if isinstance(value, list | tuple):
        return [at_home(part) for part in value]
    return {key: at_home(part) for key, part in value.items()} if isinstance(value, dict) else value


def regular_file(path: Path, *, most_bytes: int | None = None) -> Path:
    """Return the path itself, once it is known to be a file that can be read to its end.

    Raises:
        OSError: it does not exist, is a folder, a pipe, a socket or a device, or has more than `most_bytes`.
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
    """Replace a small file atomically; it is written in the folder `aside`, by default in its own."""
    partial = temporary_name((aside or path.parent) / path.name)
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        publish(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def file_problems(**options: Path | None) -> list[str]:
    """Return which of a command's options name a file that it could not write when it is done, one line each.

    Args:
        options: the files by the options' names; None: not given.
    """
    return [
        f"--{name} {path} is not a file in a folder that exists; create the folder, or name another"
        for name, path in options.items()
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir())
    ]


def publish(partial: Path, path: Path) -> None:
    """Give a complete file, or a folder of files, its name; a file of that name is replaced."""
    for folder, _, names in os.walk(partial) if partial.is_dir() else ():
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
    """Yield a folder to fill, which takes the name `destination` when the block ends, and is removed if it fails.

    Raises:
        InputError: `destination` already exists.
    """
    if destination.exists():
        raise InputError(f"{destination} already exists; name another destination, or remove it")
    partial = temporary_name(destination)
    shutil.rmtree(partial, ignore_errors=True)  # of a killed process: in a container, all have the same few numbers
    partial.mkdir(parents=True)
    try:
        yield partial
        publish(partial, destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Make errors of a file that is open name its path, which the system's own do not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with naming(path), regular_file(path).open("rb") as stream:
        return sha256_of_pieces(iter(lambda: stream.read(READ_BYTES), b""))


def sha256_of_pieces(pieces: Iterable[bytes]) -> str:
    """Return the hexadecimal SHA-256 of bytes that come in pieces, from wherever they are read."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def take_lock(path: Path, *, wait: bool) -> int | None:
    """Return a descriptor that holds the lock of a file until it is closed; the file is created if missing.

    Returns None if another process holds it and `wait` is false.
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
        # Whoever held it before may have removed the file that was opened here.
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
        os.close(descriptor)
        if not wait:
            return None
