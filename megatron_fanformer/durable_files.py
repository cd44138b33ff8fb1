"""Files and folders that exist completely or not at all, even after a power failure; their hashes, and locks.

`regular_file` stands before every opening of a file that a user or a checkpoint names: opening a pipe waits for ever.

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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from megatron_fanformer.errors import FanformerError, InputError

READ_BYTES = 1 << 20
LEAST_FREE_BYTES = 1 << 16  # a disk with less is full
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


def write_refusal(error: OSError, path: Path | str) -> str:
    """Return the system's reason for refusing a write to a path; of a full file system, also the free space."""
    reason = error.strerror or str(error)
    if error.errno not in NO_SPACE:
        return reason
    folder = Path(path)
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        return f"{reason}, {shutil.disk_usage(folder).free / 1e9:.2g} GB free"
    except OSError:
        return reason


def regular_file(path: Path, *, most_bytes: int | None = None) -> Path:
    """Return the path itself, once it is known to be a file that can be read to its end.

    Args:
        most_bytes: the size that a file of its kind never exceeds; None: any.

    Raises:
        OSError: it does not exist, is a folder, a pipe, a socket or a device, or is larger.
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
    """Replace a small file atomically.

    Args:
        aside: the folder, on the same disk, in which it is written; None: its own.

    Raises:
        OSError: it cannot be written, or something else has its name. (As root, it would replace /dev/null.)
    """
    if path.exists():
        regular_file(path)
    partial = temporary_name((aside or path.parent) / path.name)
    try:
        _remove(partial)
        with partial.open("xb") as stream:  # "x": the target of a link would be overwritten
            stream.write(content.encode() if isinstance(content, str) else content)
        publish(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


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
    sync_all(partial)
    os.replace(partial, path)
    sync(path.parent)


def temporary_name(path: Path) -> Path:
    """Return a hidden name beside a path, unique among the processes that run.

    One that was killed may have left something there: in a container, all of them have the same few numbers.
    """
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _remove(left: Path) -> None:
    """Remove the leftover of a killed process, or a link, which is not followed."""
    if left.is_dir() and not left.is_symlink():
        shutil.rmtree(left)
    else:
        left.unlink(missing_ok=True)


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """Yield a folder to fill, which takes the name `destination` when the block ends, and is removed if it fails.

    Raises:
        InputError: `destination` already exists.
        OSError: the disk is full; the error names `destination`.
    """
    if destination.exists():
        raise InputError(f"{destination} already exists; name another destination, or remove it")
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = temporary_name(destination)
    _remove(partial)
    partial.mkdir()
    try:
        yield partial
        publish(partial, destination)
    except BaseException as error:
        full = None if isinstance(error, FanformerError | KeyboardInterrupt) else full_disk(partial)
        shutil.rmtree(partial, ignore_errors=True)
        if full is not None:
            raise OSError(full.errno, full.strerror, str(destination)) from error
        raise


def full_disk(folder: Path) -> OSError | None:
    """Return the system's error of a full disk, or None where it has space.

    Call it after a failed write, before removing the partial files: libraries often do not pass the error on.
    """
    if shutil.disk_usage(folder).free >= LEAST_FREE_BYTES:
        return None
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def sync_all(path: Path) -> None:
    """Flush a file, or a folder with all that is in it."""
    for folder, _, names in os.walk(path) if path.is_dir() else ():
        for name in names:
            sync(Path(folder, name))
        if Path(folder) != path:
            sync(Path(folder))
    sync(path)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk.

    Raises:
        OSError: the disk, or the machine that has it, does not take it; names the path.
    """
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


def remove_with_lock(folder: Path, lock: Path, descriptor: int) -> None:
    """Remove a folder with the lock that this process holds in it, which goes last and is released.

    A network file system keeps an open file that is removed under another name (`.nfs…`) until it is closed: so the
    folder goes after that. One that still holds something stays: another process has begun in it, or has the lock open.
    """
    try:
        empty(folder, except_for=lock)
        lock.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
    with suppress(OSError):
        folder.rmdir()


def empty(folder: Path, *, except_for: Path) -> None:
    """Remove all that is in a folder but one file."""
    for path in folder.iterdir():
        if path != except_for:
            _remove(path)


def take_lock(path: Path, *, wait: bool) -> int | None:
    """Return a descriptor that holds the lock of a file until it is closed; the file is created if missing.

    Returns None if another process holds it and `wait` is false.

    Raises:
        OSError: the file cannot be opened.
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
