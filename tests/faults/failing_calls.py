"""Makes calls to the system fail: the k-th one below a folder, in this process and in all that are forked from it.

Calls are counted in one place for all these processes: the writers of a checkpoint are forks of their rank. What is
written through a stream is counted by the stream's own `write`: Python makes no call of `os` for it. There are
thousands of these, since torch writes headers and padding on their own: the 1st, 2nd, 4th, … of each stream is counted.
"""

import builtins
import errno
import io
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

Kind = Literal["full", "broken", "short"]
"""full: from the k-th call on, nothing can be created or written. broken: the k-th call fails with EIO. short: of what
the k-th call writes, if it does, half is written."""

CREATING = ("mkdir", "link", "symlink")
WRITING = ("fsync", "fdatasync", "sendfile", "write")
NAMING = ("rename", "replace", "unlink", "remove", "rmdir")


class FailingCalls:
    """Counts the calls below a folder, and fails the `target`-th; 0 fails none."""

    def __init__(self, folder: Path, target: int, kind: Kind) -> None:
        self._folder = os.path.realpath(folder)
        self._target, self._kind = target, kind
        self._count = multiprocessing.Value("i", 0)

    @property
    def count(self) -> int:
        """The calls so far."""
        return self._count.value

    @contextmanager
    def planted(self) -> Iterator["FailingCalls"]:
        """While the block runs, calls are counted, and the target fails."""
        names = {name: getattr(os, name) for name in (*CREATING, *WRITING, *NAMING, "open")}
        opening = io.open
        for name, call in names.items():
            setattr(os, name, self._wrapped(name, call))
        builtins.open = io.open = self._opening(opening)  # type: ignore[assignment]
        try:
            yield self
        finally:
            for name, call in names.items():
                setattr(os, name, call)
            builtins.open = io.open = opening  # type: ignore[assignment]

    @property
    def is_full(self) -> bool:
        """Whether the disk is full by now."""
        return self._kind == "full" and 0 < self._target <= self.count

    def is_due(self, *, writes: bool) -> bool:
        """Count a call; whether it is to fail."""
        with self._count.get_lock():
            self._count.value += 1
            number = self._count.value
        if self._kind == "full":
            return writes and 0 < self._target <= number
        return number == self._target and (writes or self._kind == "broken")

    def failure(self, path: object) -> OSError:
        """What the system would say."""
        number = errno.EIO if self._kind == "broken" else errno.ENOSPC
        return OSError(number, os.strerror(number), str(path))

    @property
    def writes_half(self) -> bool:
        """Whether a write that fails has written half of it."""
        return self._kind == "short"

    def _is_below(self, path: Any, folder: int | None = None) -> bool:
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif folder is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fspath(path))
        return os.path.abspath(os.fspath(path)).startswith(self._folder)

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(path: Any, *arguments: Any, **named: Any) -> Any:
            is_reading = name == "open" and not arguments[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if is_reading or not self._is_below(path, named.get("dir_fd")):
                return call(path, *arguments, **named)
            if self.is_due(writes=name not in NAMING):
                raise self.failure(path)
            return call(path, *arguments, **named)

        return counted

    def _opening(self, opening: Callable[..., Any]) -> Callable[..., Any]:
        def counted(path: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            if not set(mode) & set("wxa+") or not self._is_below(path):
                return opening(path, mode, *arguments, **named)
            if self.is_due(writes=True):
                raise self.failure(path)
            return _Stream(opening(path, mode, *arguments, **named), self, path)

        return counted


class _Stream:
    """A stream whose writes are counted."""

    def __init__(self, stream: Any, calls: FailingCalls, path: Any) -> None:
        self._stream, self._calls, self._path = stream, calls, path
        self._writes = 0

    def write(self, data: Any) -> Any:
        self._writes += 1
        is_counted = not self._writes & (self._writes - 1)
        if self._calls.is_due(writes=True) if is_counted else self._calls.is_full:
            if self._calls.writes_half:
                self._stream.write(data[: len(data) // 2])
            raise self._calls.failure(self._path)
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
