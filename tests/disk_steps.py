"""Disks for tests: one that records in which order files reach it, a full one, and one on the network."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest


def recorded_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Fill the list from here on with ("fsync", NAME) and ("rename", NEW NAME), as this process takes these steps."""
    steps: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        steps.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def recorded_replace(old: Any, new: Any) -> None:
        steps.append(("rename", Path(new).name))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    return steps


def network_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what is removed while this process has it open stay as `.nfs…` until it is closed, as a client of NFS."""
    unlink, close = os.unlink, os.close

    def kept_unlink(path: Any, *, dir_fd: int | None = None) -> None:
        found = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        if not any(os.path.samestat(found, other) for other in _open_files()):
            unlink(path, dir_fd=dir_fd)
        elif Path(path).name.startswith(".nfs"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
        else:
            os.rename(path, Path(path).with_name(f".nfs{found.st_ino}"), src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def ending_close(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        close(descriptor)
        if path.name.startswith(".nfs"):
            unlink(path)

    monkeypatch.setattr(os, "unlink", kept_unlink)
    monkeypatch.setattr(os, "close", ending_close)


def _open_files() -> Iterator[os.stat_result]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # of the listing itself
            yield os.fstat(int(name))


@contextmanager
def small_files(most_bytes: int) -> Iterator[None]:
    """A system that takes no larger file; what it says is EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
