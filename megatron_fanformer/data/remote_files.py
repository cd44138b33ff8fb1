"""Token files on other stores: look them up, list them, copy them, and read ranges of bytes.

A file is identified by its URL, its size and its *version*: an ETag, a generation or a time that the store states. Size
and version are recorded at the look-up; a run compares them again when it saves (`refuse_changed`). fsspec's drivers
read the bytes. Requests run in threads, so that they overlap whatever the driver.

Every request raises InputError if there is no driver for the store, if access is denied, or if the store serves no
ranges or sizes; and FanformerError if the store does not answer for PATIENCE_SECONDS.
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

PART_BYTES, PARTS = 1 << 22, 8  # a file is copied by requests of PART_BYTES, PARTS of them at a time
THREADS = 32
REQUEST_SECONDS = 20.0  # after which a request fails
PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, *[16.0] * 6)  # between attempts
# For all attempts: less than the default of runtime.distributed_timeout_minutes, since other ranks wait meanwhile.
PATIENCE_SECONDS = 70.0
# Fields of fsspec's `info` that identify the content, and times, for stores that state none of these fields.
_CONTENT_FIELDS = ("ETag", "etag", "generation", "blob_id", "md5Hash", "content_md5", "Content-MD5")
_TIME_FIELDS = ("mtime", "Last-Modified", "LastModified", "last_modified", "modified", "updated", "created")

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class RemoteFile:
    """A file on another store, as it was at the look-up."""

    url: str
    size: int
    version: str | None
    """The version that the store states; None: it states none, so that only a change of the size is noticed."""

    @property
    def path(self) -> str:
        """Return the URL for messages, without a password."""
        return redacted(self.url)

    @property
    def identity(self) -> str:
        """Return URL, size and version."""
        return f"{self.path} {self.size} {self.version}"

    def read(self, count: int, offset: int) -> bytes:
        """Return `count` bytes from byte `offset` on. Raises CorruptError if the file is no longer there."""
        if not count:
            return b""
        end = offset + count
        if count > PART_BYTES:
            starts = range(offset, end, PART_BYTES)
            return b"".join(map_in_threads(lambda start: self.read(min(PART_BYTES, end - start), start), starts))
        content = _request(self.url, "cat_file", start=offset, end=end)
        if content is None:
            raise CorruptError(f"{self.path} is no longer there; put it back and resume")
        return bytes(content)

    def values(self, dtype: np.dtype[Any], first: int, count: int) -> np.ndarray:
        """Return `count` values of the file, [count], from value number `first` on."""
        return np.frombuffer(self.read(count * dtype.itemsize, first * dtype.itemsize), dtype)


def map_in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call a function on each item, in threads, and return the results in order. Meant for functions that wait."""
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(function, items))


# -- requests


@functools.lru_cache(maxsize=64)
def _driver(_process: int, store: str) -> Any:
    """Return a store's driver, one for each process: drivers do not survive a fork."""
    return driver_of(store)[0]


def _driver_of(url: str) -> Any:
    parts = urlsplit(url)
    return _driver(os.getpid(), f"{parts.scheme}://{parts.netloc}/")


def _request(url: str, method: str, *, refused_is_missing: bool = False, **options: Any) -> Any:
    """Call a method of the store's driver with the path of a URL, again and again while the store fails.

    Return None if there is no such file, or, with `refused_is_missing`, if access is denied.
    """
    attempt = functools.partial(_attempt, url, method, options, refused_is_missing)
    log = functools.partial(logger.debug, "attempt %d: %s")
    return query(url, attempt, pauses=PAUSES_SECONDS, patience=PATIENCE_SECONDS, report=log)


def _attempt(url: str, method: str, options: dict[str, Any], refused_is_missing: bool) -> Any:
    """Call a method of the store's driver once. ConnectionError means that another attempt may succeed."""
    driver = _driver_of(url)
    settings: dict[str, Any] = {"timeout": REQUEST_SECONDS} if driver.async_impl else {}
    if method == "cat_file" and url.startswith("http"):  # otherwise a server may send a compressed body
        settings["headers"] = {"Accept-Encoding": "identity"}
    elif method == "cat_file" and not driver.async_impl:
        settings["cache_type"] = "none"  # by default fsspec reads 5 MiB ahead
    try:
        answer = getattr(driver, method)(driver._strip_protocol(url), **options, **settings)
    except NotImplementedError:
        raise InputError(f"{redacted(url)} cannot be listed; name the files, one by one or in a .blend") from None
    except Exception as error:  # drivers raise what they like
        is_refused = _status_of(error) in (401, 403) or isinstance(error, PermissionError)
        if _is_missing(error) or (is_refused and refused_is_missing):
            return None
        if is_refused:
            raise PermissionError(f"{reason_of(error)}, check its credentials") from error
        _driver.cache_clear()  # the driver may have lost its connection
        raise ConnectionError(reason_of(error)) from error
    size = options["end"] - options["start"] if "start" in options else None  # of the requested range
    if size is not None and len(answer) < size:
        raise ConnectionError(f"{len(answer)} of {size} bytes came")
    if size is not None and len(answer) > size:
        raise InputError(
            f"{redacted(url)}: its store sends {len(answer)} bytes for a range of {size}, it does not serve ranges;"
            " serve it by one that does, or copy it to this machine"
        )
    return answer


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status of a driver's error or of the error that caused it; None if there is none."""
    for cause in filter(None, (error, error.__cause__)):
        status = getattr(cause, "status", None) or getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def _is_missing(error: Exception) -> bool:
    """Return whether an error means a missing file. fsspec's FileNotFoundError may also mean an unreachable server."""
    status, cause = _status_of(error), error.__cause__
    if status is not None:
        return status in (404, 410)
    is_unreachable = isinstance(cause, OSError | asyncio.TimeoutError) or type(cause).__module__.startswith("aiohttp")
    return isinstance(error, FileNotFoundError) and not is_unreachable


# -- files that were looked up


def forget_files() -> None:
    """Forget drivers, look-ups, listings and small files, so that they are requested again."""
    for cached_function in (_driver, find_file, _listing, _content):
        cached_function.cache_clear()


def look_up(urls: Iterable[str]) -> list[RemoteFile | None]:
    """Call `find_file` on each URL, in threads, so that requests overlap; return the results in order."""
    return map_in_threads(find_file, urls)


@functools.cache
def find_file(url: str) -> RemoteFile | None:
    """Return the file at a URL, as remembered since the last `forget_files`; None if there is none."""
    _driver_of(url).invalidate_cache()  # otherwise a driver may answer from an old listing
    info = _request(url, "info")
    if info is None or info.get("type") == "directory":
        return None
    if not isinstance(info.get("size"), int):
        raise InputError(f"{redacted(url)}: its store states no size; serve it by one that does")
    version = next((str(info[name]) for name in (*_CONTENT_FIELDS, *_TIME_FIELDS) if info.get(name)), None)
    if version and "ino" in info and not any(map(info.get, _CONTENT_FIELDS)):
        version += f" {info['ino']}"  # a replaced file may have the same time, but has another inode
    return RemoteFile(url, info["size"], version)


def refuse_changed(files: Sequence[RemoteFile]) -> None:
    """Raise CorruptError if a file has changed since it was looked up."""
    files_now = map_in_threads(find_file.__wrapped__, [file.url for file in files])  # not from the cache of find_file
    for file, now in zip(files, files_now, strict=True):
        if now != file:
            raise CorruptError(f"{file.path} is another file than when the run began; put it back and resume")


def list_files(url: str, suffix: str | tuple[str, ...]) -> list[str]:
    """Return the sorted URLs in a folder (its URL ends in /), or that match a glob pattern, if they end in `suffix`."""
    return [file for file in _listing(url) if file.endswith(suffix)]


@functools.cache
def _listing(url: str) -> list[str]:
    driver = _driver_of(url)
    driver.invalidate_cache()
    paths = _request(url, "ls" if url.endswith("/") else "glob", detail=False) or []
    return sorted(map(driver.unstrip_protocol, paths))


def read_small_files(urls: Iterable[str]) -> list[bytes | None]:
    """Return the bytes of the small file at each URL, or None if there is no file; `forget_files` forgets the answers.

    A file to which access is denied counts as missing: a store that denies listing answers so for missing files.
    """
    return map_in_threads(_content, urls)


@functools.cache
def _content(url: str) -> bytes | None:
    content: bytes | None = _request(url, "cat_file", refused_is_missing=True)
    return content


# -- whole files


def open_stream(file: RemoteFile, **options: Any) -> Any:
    """Open a file for readers that seek or read the whole file, such as pyarrow; `options` are fsspec's."""
    driver = _driver_of(file.url)
    return driver.open(driver._strip_protocol(file.url), "rb", **options)


def copy_to(file: RemoteFile, path: Path) -> None:
    """Copy a file to `path` on this machine; only a complete copy gets this name."""
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


def version_folder(cache: Path, identity: str) -> Path:
    """Return the folder in a cache for one version of a file; `identity` is that of a `RemoteFile`."""
    return cache / hashlib.sha256(identity.encode()).hexdigest()[:32]


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Make a folder of copies if it is missing, and lock it; other processes wait until the block ends."""
    with reported_as_local(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(folder / ".lock", wait=True)
    assert lock is not None
    try:
        yield
    finally:
        os.close(lock)
