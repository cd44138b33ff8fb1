"""Token files on other stores: looked up, listed, copied, and read by ranges.

A file is known by its URL, its size and its *version*, stated by the store (ETag, generation, times).
Both are pinned when it is looked up; a run compares them again when it saves (`refuse_changed`). fsspec brings the
bytes, a request a thread, so that requests wait side by side whatever the driver.

Every request raises InputError where there is no driver for the store, no right to use it, or it serves no ranges or
sizes, and FanformerError where it does not answer for PATIENCE_SECONDS.
"""

import asyncio
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np

from megatron_fanformer.durable_files import publish, take_lock, temporary_name
from megatron_fanformer.errors import CorruptError, InputError, redacted
from megatron_fanformer.stores import driver_of, query, reason_of, reported_as_local

PART_BYTES, PARTS = 1 << 22, 8  # of one request of a file that is read whole, and requests at a time
THREADS = 32
REQUEST_SECONDS = 20.0
PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, *[16.0] * 6)
# Less than runtime.distributed_timeout_minutes by default: the other ranks wait meanwhile.
PATIENCE_SECONDS = 70.0
# Of what drivers say of a file: names of its content, and what changes with it where there is none.
_STRONG = ("ETag", "etag", "generation", "blob_id", "md5Hash", "content_md5", "Content-MD5")
_WEAK = ("mtime", "Last-Modified", "LastModified", "last_modified", "modified", "updated", "created")

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class RemoteFile:
    """A file on another store, as it was when it was looked up."""

    url: str
    size: int
    version: str | None
    """Stated by the store of its content; None: nothing, and a change that keeps the size is not noticed."""

    @property
    def path(self) -> str:
        """Return its URL as messages show it."""
        return redacted(self.url)

    @property
    def identity(self) -> str:
        """Return URL, size and version."""
        return f"{self.path} {self.size} {self.version}"

    def read(self, count: int, offset: int) -> bytes:
        """Read `count` bytes from byte `offset` on; raises CorruptError if the file is no longer there."""
        if count > PART_BYTES:
            starts = range(offset, offset + count, PART_BYTES)
            return b"".join(side_by_side(lambda at: self.read(min(PART_BYTES, offset + count - at), at), starts))
        if not count:
            return b""
        content = _request(self.url, "cat_file", start=offset, end=offset + count)
        if content is None:
            raise CorruptError(f"{self.path} is no longer there; put it back and resume")
        return bytes(content)

    def values(self, dtype: np.dtype[Any], first: int, count: int) -> np.ndarray:
        """Return [count] values from number `first` on."""
        return np.frombuffer(self.read(count * dtype.itemsize, first * dtype.itemsize), dtype)


def side_by_side(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return the results of a function that waits for requests, called in threads."""
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(function, items))


# -- requests


@functools.lru_cache(maxsize=64)
def _driver(_process: int, store: str) -> Any:
    """Return a store's driver in this process: drivers do not survive a fork."""
    return driver_of(store)[0]


def _driver_of(url: str) -> Any:
    parts = urlsplit(url)
    return _driver(os.getpid(), f"{parts.scheme}://{parts.netloc}/")


def _request(url: str, method: str, *, refused_is_missing: bool = False, **options: Any) -> Any:
    """Call a method of a store's driver with the path of a URL; return None where there is no such file."""
    attempt = functools.partial(_attempt, url, method, options, refused_is_missing)
    return query(url, attempt, pauses=PAUSES_SECONDS, patience=PATIENCE_SECONDS, report=_note)


def _note(attempt: int, reason: str) -> None:
    logger.debug("attempt %d: %s", attempt, reason)


def _attempt(url: str, method: str, options: dict[str, Any], refused_is_missing: bool) -> Any:
    files = _driver_of(url)
    settings: dict[str, Any] = {"timeout": REQUEST_SECONDS} if files.async_impl else {}
    if method == "cat_file" and url.startswith("http"):  # or a compressed body would be taken for the bytes
        settings["headers"] = {"Accept-Encoding": "identity"}
    elif method == "cat_file" and not files.async_impl:
        settings["cache_type"] = "none"  # by itself fsspec reads 5 MiB more
    try:
        answer = getattr(files, method)(files._strip_protocol(url), **options, **settings)
    except NotImplementedError:
        raise InputError(f"{redacted(url)} cannot be listed; name the files, one by one or in a .blend") from None
    except Exception as error:  # drivers raise what they like
        is_refused = _status_of(error) in (401, 403) or isinstance(error, PermissionError)
        if _is_missing(error) or (is_refused and refused_is_missing):
            return None
        if is_refused:
            raise PermissionError(f"{reason_of(error)}, check its credentials") from error
        _driver.cache_clear()  # this one may have lost its connection
        raise ConnectionError(reason_of(error)) from error
    if "start" in options and len(answer) != (size := options["end"] - options["start"]):
        if len(answer) < size:
            raise ConnectionError(f"{len(answer)} of {size} bytes came")
        raise InputError(
            f"{redacted(url)}: its store sends {len(answer)} bytes for a range of {size}, it does not serve ranges;"
            " serve it by one that does, or copy it to this machine"
        )
    return answer


def _status_of(error: BaseException) -> int | None:
    """Return the status of HTTP that an error or its response states, also where a driver made another error of it."""
    for cause in filter(None, (error, error.__cause__)):
        status = getattr(cause, "status", None) or getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def _is_missing(error: Exception) -> bool:
    """Return whether a file is not there: a look-up by HTTP ends in FileNotFoundError, whatever its cause."""
    cause = error.__cause__
    if (status := _status_of(error)) is not None:
        return status in (404, 410)
    is_connection = isinstance(cause, OSError | asyncio.TimeoutError) or type(cause).__module__.startswith("aiohttp")
    return isinstance(error, FileNotFoundError) and not is_connection


# -- files that were looked up


def forget() -> None:
    """Look all files up anew from now on."""
    for remembered in (_driver, _stated_file, _listing, _content):
        remembered.cache_clear()


def look_up(urls: Iterable[str]) -> list[RemoteFile | None]:
    """Return files, looked up at once; None where there is none. They are remembered in this process until `forget`."""
    return side_by_side(_stated_file, urls)


@functools.cache
def _stated_file(url: str) -> RemoteFile | None:
    _driver_of(url).invalidate_cache()  # of listings that a driver would answer from
    info = _request(url, "info")
    if info is None or info.get("type") == "directory":
        return None
    if not isinstance(info.get("size"), int):
        raise InputError(f"{redacted(url)}: its store states no size; serve it by one that does")
    strong = next((str(info[name]) for name in _STRONG if info.get(name)), None)
    weak = next((str(info[name]) for name in _WEAK if info.get(name)), None)
    return RemoteFile(url, info["size"], strong or (f"{weak} {info['ino']}" if weak and "ino" in info else weak))


def find(url: str) -> RemoteFile | None:
    """Return a file; None where there is none."""
    return look_up([url])[0]


def refuse_changed(files: Sequence[RemoteFile]) -> None:
    """Raise CorruptError for a file that has changed since it was looked up."""
    for file, now in zip(files, side_by_side(_stated_file.__wrapped__, [file.url for file in files]), strict=True):
        if now != file:
            raise CorruptError(f"{file.path} is another file than when the run began; put it back and resume")


def listed(url: str, suffix: str | tuple[str, ...]) -> list[str]:
    """Return the sorted URLs of a folder (a URL that ends in /) or of a glob pattern, whose names end in `suffix`."""
    return [file for file in _listing(url) if file.endswith(suffix)]


@functools.cache
def _listing(url: str) -> list[str]:
    files = _driver_of(url)
    files.invalidate_cache()
    return sorted(map(files.unstrip_protocol, _request(url, "ls" if url.endswith("/") else "glob", detail=False) or []))


def optional_contents(urls: Iterable[str]) -> list[bytes | None]:
    """Return the bytes of small files, read whole and at once; None where there is none. They are remembered.

    A store that gives no right to list answers for a file that is not there that there is no right: it counts as none.
    """
    return side_by_side(_content, urls)


@functools.cache
def _content(url: str) -> bytes | None:
    content: bytes | None = _request(url, "cat_file", refused_is_missing=True)
    return content


# -- whole files


def open_stream(file: RemoteFile) -> Any:
    """Return the driver's own open file, for readers of whole files and for pyarrow, which seeks."""
    files = _driver_of(file.url)
    return files.open(files._strip_protocol(file.url), "rb")


def copy_to(file: RemoteFile, path: Path) -> None:
    """Copy a whole file to this machine, where it appears when it is complete."""
    partial, step = temporary_name(path), PART_BYTES * PARTS
    with reported_as_local(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("wb") as out:
                for first in range(0, file.size, step):
                    out.write(file.read(min(step, file.size - first), first))
            publish(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def folder_of(cache: Path, identity: str) -> Path:
    """Return the folder in a cache for copies of a file in one version, by its `identity`."""
    return cache / hashlib.sha256(identity.encode()).hexdigest()[:32]


@contextmanager
def only_one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold a folder of copies while it is filled, which is made if need be; other processes wait."""
    with reported_as_local(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(folder / ".lock", wait=True)
    assert lock is not None
    try:
        yield
    finally:
        os.close(lock)
