"""The requests of this process to the stores that token files are on: many at a time, each bounded, and made again.

What fails is made again, at growing distances and not at once by all ranks, for as long as a waiting rank is not
taken for a stuck one. fsspec brings the bytes. Its filesystems do not survive a fork: each process makes its own.
"""

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from megatron_fanformer.errors import FanformerError, redacted
from megatron_fanformer.stores import driver_of, reason_of, scheme_of, with_attempts

REQUEST_SECONDS = 20.0
PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, *[16.0] * 6)
# Less than runtime.distributed_timeout_minutes by default: the other ranks wait meanwhile.
PATIENCE_SECONDS = 70.0
JITTER = 0.5
MOST_REQUESTS = 64  # at a time, of a process to a store
THREADS = 16  # where a driver takes one request at a time
SECONDS_BETWEEN_WARNINGS = 600.0  # between lines about a store that fails

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Store:
    """One store's filesystem in this process, whose requests are run side by side."""

    def __init__(self, url: str) -> None:
        self._url, self._lock = url, threading.Lock()
        self._files: Any = None
        self._threads: ThreadPoolExecutor | None = None
        self._limit: asyncio.Semaphore | None = None
        self.refuses_others: bool | None = None
        """Whether it refuses to read another version than the one stated; None: not tried yet."""
        self.warned_at = -SECONDS_BETWEEN_WARNINGS
        self.has_warned_versionless = False

    @property
    def files(self) -> Any:
        """Return the driver."""
        with self._lock:
            if self._files is None:
                self._files, _ = driver_of(self._url)
            return self._files

    def reconnect(self) -> None:
        """Make another driver for the next request: this one may have lost its connection."""
        with self._lock:
            self._files = None

    def run(self, calls: Sequence["Call"]) -> list[Any]:
        """Return of each call its result, or its exception.

        Raises:
            InputError: there is no driver for the store.
        """
        if not calls:
            return []
        files = self.files
        if files.async_impl:
            from fsspec.asyn import sync

            return list(sync(files.loop, self._side_by_side, files, calls))
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(THREADS)
        return list(self._threads.map(functools.partial(_called, files), calls))

    async def _side_by_side(self, files: Any, calls: Sequence["Call"]) -> list[Any]:
        if self._limit is None:
            self._limit = asyncio.Semaphore(MOST_REQUESTS)
        limit = self._limit

        end = time.monotonic() + PATIENCE_SECONDS
        answered = False

        async def one(call: "Call") -> Any:
            nonlocal answered
            async with limit:
                if not answered and time.monotonic() > end:
                    raise TimeoutError("nothing came of the requests before it")
                found = await asyncio.wait_for(call.awaitable(files), REQUEST_SECONDS)
                answered = True
                return found

        return await asyncio.gather(*map(one, calls), return_exceptions=True)


class Call(NamedTuple):
    """One request: to look a file up (`is_lookup`), or for a range of it, or for all of it (`end` None).

    With a `version`, other versions are refused.
    """

    url: str
    is_lookup: bool = False
    first: int | None = None
    end: int | None = None
    version: str | None = None

    def awaitable(self, files: Any) -> Any:
        """Return the request of a driver that takes several at a time."""
        path = files._strip_protocol(self.url)
        if self.is_lookup:
            return files._info(path)
        if self.version is not None:
            return CONDITIONAL[scheme_of(self.url)](files, path, self)
        if scheme_of(self.url) in ("http", "https"):  # which would take a compressed body for the file's bytes
            return files._cat_file(path, start=self.first, end=self.end, headers={"Accept-Encoding": "identity"})
        return files._cat_file(path, start=self.first, end=self.end)


def _called(files: Any, call: Call) -> Any:
    """Return the result of a request of a driver that takes one at a time, or its exception."""
    try:
        path = files._strip_protocol(call.url)
        if call.is_lookup:
            return files.info(path)
        # By itself fsspec reads 5 MiB more than it is asked for, as if the rest of the file came next.
        return files.cat_file(path, start=call.first, end=call.end, cache_type="none")
    except Exception as error:  # drivers raise what they like
        return error


def _http_range(files: Any, path: str, call: Call) -> Any:
    headers = {"Accept-Encoding": "identity", "If-Match": call.version}
    return files._cat_file(path, start=call.first, end=call.end, headers=headers)


async def _s3_range(files: Any, path: str, call: Call) -> bytes:
    """Do what `_cat_file` does, which cannot state an ETag."""
    bucket, key, _ = files.split_path(path)
    assert call.first is not None and call.end is not None
    stated = {"Range": f"bytes={call.first}-{call.end - 1}", "IfMatch": call.version}
    response = await files._call_s3("get_object", Bucket=bucket, Key=key, **stated)
    async with response["Body"] as body:
        content: bytes = await body.read()
    return content


CONDITIONAL: dict[str, Callable[[Any, str, Call], Any]] = {
    "http": _http_range,
    "https": _http_range,
    "s3": _s3_range,
    "s3a": _s3_range,
}
NO_SUCH_VERSION = '"0"'


_stores: dict[tuple[str, str], "Store"] = {}
_owner = os.getpid()
_owner_lock = threading.Lock()


def _new_lock() -> None:
    global _owner_lock
    _owner_lock = threading.Lock()  # a thread may have held it at the fork


os.register_at_fork(after_in_child=_new_lock)


def store_of(url: str) -> "Store":
    """Return this process's store of a URL; a forked process begins anew."""
    global _owner
    parts = urlsplit(url)
    with _owner_lock:
        if _owner != os.getpid():
            _stores.clear()
            _owner = os.getpid()
        return _stores.setdefault((parts.scheme, parts.netloc), Store(url))


# -- what failed


def status_of(error: BaseException) -> int | None:
    """Return the status of HTTP that an error or its response states, also where a driver made another error of it."""
    for each in filter(None, (error, error.__cause__)):
        status = getattr(each, "status", None) or getattr(getattr(each, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def is_missing(error: Any) -> bool:
    """Return whether a file is not there. Looking up by HTTP ends in FileNotFoundError, whatever failed: its cause
    decides.
    """
    if (status := status_of(error)) is not None:
        return status in (404, 410)
    cause = error.__cause__
    is_connection = isinstance(cause, OSError | asyncio.TimeoutError) or type(cause).__module__.startswith("aiohttp")
    return isinstance(error, FileNotFoundError) and not is_connection


def is_refused(error: Any) -> bool:
    """Return whether there is no right to a file, or are no valid credentials."""
    return status_of(error) in (401, 403) or isinstance(error, PermissionError)


def is_late(error: Any) -> bool:
    """Return whether nothing came in time."""
    return isinstance(error, TimeoutError | asyncio.TimeoutError)


def is_other_version(error: Any) -> bool:
    """Return whether a store has the file in another version than the one stated."""
    return status_of(error) == 412 or "precondition" in str(error).replace("-", "").lower()


class Failed(Exception):
    """A request that may succeed if it is made again."""

    def __init__(self, url: str, error: BaseException) -> None:
        super().__init__(reason_of(error))
        self.url, self.error = url, error


def until_done(attempt: Callable[[], Result], url: str) -> Result:
    """Repeat what raises Failed; the first failure of a store is logged, and no other for a while.

    Raises:
        FanformerError: the store's last error, in one line.
    """
    started = time.monotonic()
    attempts = 0

    def report(number: int, reason: str) -> None:
        nonlocal attempts
        attempts, store = number, store_of(url)
        now = time.monotonic()
        is_first = now - store.warned_at > SECONDS_BETWEEN_WARNINGS
        if is_first:
            store.warned_at = now
        logger.log(
            logging.WARNING if is_first else logging.DEBUG,
            "%s: a request failed (%s); failed requests are made again, for up to %.0f s",
            redacted(url),
            reason.removeprefix("Failed: "),
            PATIENCE_SECONDS,
        )
        store.reconnect()

    try:
        return with_attempts(
            attempt, report, PAUSES_SECONDS, (FanformerError,), patience=PATIENCE_SECONDS, jitter=JITTER
        )
    except Failed as failed:
        remedy = "renew its credentials, and start again" if is_refused(failed.error) else "check it, and start again"
        raise FanformerError(
            f"{redacted(failed.url)} cannot be read: {attempts} attempts in {time.monotonic() - started:.0f} s failed, "
            f"the last with {failed}; its store does not serve it: {remedy}"
        ) from failed.error
