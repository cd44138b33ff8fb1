"""Token files on other stores: found, known again, and read by ranges, many at once.

A file is known by its URL, its size and its *version*: what the store states of its content (ETag, generation, times).
Every read is of that version or fails: where the store can be made to refuse others (`If-Match`, tried once for each
store), each request says so; else the version is looked up again after each read.
"""

import errno
import glob
import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from megatron_fanformer.data.remote_stores import (
    CONDITIONAL,
    NO_SUCH_VERSION,
    Call,
    Failed,
    Store,
    is_late,
    is_missing,
    is_other_version,
    is_refused,
    status_of,
    store_of,
    until_done,
)
from megatron_fanformer.durable_files import publish, take_lock, temporary_name
from megatron_fanformer.errors import CorruptError, InputError, redacted
from megatron_fanformer.stores import reason_of, reported_as_local, scheme_of

PART_BYTES, PARTS = 1 << 22, 8  # of a file that is read whole: of one request, and at a time
# Of what drivers say of a file: names of its content, and what changes with it where there is none.
_STRONG = ("ETag", "etag", "generation", "blob_id", "md5Hash", "content_md5", "Content-MD5")
_WEAK = ("mtime", "Last-Modified", "LastModified", "last_modified", "modified", "updated", "created")

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True)
class RemoteFile:
    """A file on another store, in one version; takes the place of a LiveFile."""

    url: str
    size: int
    version: str | None
    """What the store states of its content; None: nothing, and a change that keeps the size is not noticed."""
    is_conditional: bool = False
    """Whether the store refuses to read another version."""

    @property
    def path(self) -> str:
        """Return its URL as messages show it."""
        return redacted(self.url)

    @property
    def identity(self) -> str:
        """Return what it is known by."""
        return f"{self.path} {self.size} {self.version}"

    def read(self, count: int, offset: int) -> bytes:
        """Read `count` bytes from byte `offset` on; raises like `read_ranges`."""
        if count > PART_BYTES:
            return b"".join(parts_of(self, first=offset, end=offset + count))
        return _PREFETCH.read(Range(self, offset, count))

    def values(self, dtype: np.dtype[Any], first: int, count: int) -> np.ndarray:
        """Return [count] values from number `first` on; raises like `read_ranges`."""
        return np.frombuffer(self.read(count * dtype.itemsize, first * dtype.itemsize), dtype)


class Range(NamedTuple):
    """A range of bytes of a file."""

    file: RemoteFile
    offset: int
    length: int


# -- finding files

_found: dict[str, RemoteFile | None] = {}
_contents: dict[str, bytes | None] = {}
_listings: dict[tuple[str, str | tuple[str, ...]], list[str]] = {}


def forget() -> None:
    """Look all files up anew from now on."""
    for remembered in (_found, _contents, _listings):
        remembered.clear()


def look_up(urls: Iterable[str]) -> None:
    """Look many files up at once; what is found is remembered in this process, until `forget`.

    Raises:
        InputError: there is no driver for a store, no right to use it, or no size stated.
        FanformerError: a store does not answer.
    """
    for store, own in _by_store(url for url in urls if url not in _found):

        def attempt(store: Store = store, own: list[str] = own) -> None:
            left = [url for url in own if url not in _found]
            answers = _lookups(store, left)
            failed = []
            for url, answer in zip(left, answers, strict=True):
                if not isinstance(answer, BaseException):
                    _found[url] = _file_from(store, url, answer)
                elif is_missing(answer):
                    _found[url] = None
                elif is_refused(answer):
                    raise _no_right(url, answer)
                else:
                    failed.append(Failed(url, answer))
            if failed:
                raise failed[0]

        until_done(attempt, own[0])


def find(url: str) -> RemoteFile | None:
    """Return a file; None where there is none. Raises like `look_up`."""
    look_up([url])
    return _found[url]


def is_pattern(url: str) -> bool:
    """Return whether a URL is a glob pattern, and not the name of a file that has its characters, as here. Raises like
    `look_up`.
    """
    return glob.has_magic(url) and find(url) is None


def listed(url: str, suffix: str | tuple[str, ...]) -> list[str]:
    """Return the URLs of the files of a folder (a URL that ends in /) or of a glob pattern, sorted.

    Those whose names end in `suffix`, or one of them.

    Raises:
        InputError: the store cannot be listed, or gives no right to.
        FanformerError: it does not answer.
    """
    if (url, suffix) in _listings:
        return _listings[url, suffix]
    store = store_of(url)

    def attempt() -> list[str]:
        files = store.files
        path = files._strip_protocol(url)
        try:
            files.invalidate_cache()
            infos = files.ls(path, detail=True) if url.endswith("/") else files.glob(path, detail=True).values()
        except NotImplementedError:
            raise InputError(f"{redacted(url)} cannot be listed; name the files, one by one or in a .blend") from None
        except Exception as error:
            if is_missing(error):
                return []
            if is_refused(error):
                raise _no_right(url, error) from None
            raise Failed(url, error) from error
        found = {files.unstrip_protocol(info["name"]): info for info in infos if info["name"].endswith(suffix)}
        for name, info in found.items():
            if info.get("type") == "file" and isinstance(info.get("size"), int) and _version_of(info):
                _found.setdefault(name, _file_from(store, name, info))
        return sorted(found)

    _listings[url, suffix] = until_done(attempt, url)
    return _listings[url, suffix]


def look_up_contents(urls: Iterable[str]) -> None:
    """Read many small files that need not be there, whole and at once; remembered like what `look_up` finds.

    A store that gives no right to list answers for a file that is not there that there is no right: it counts as none.

    Raises: like `look_up`.
    """
    for store, own in _by_store(url for url in urls if url not in _contents):

        def attempt(store: Store = store, own: list[str] = own) -> None:
            left = [url for url in own if url not in _contents]
            failed, refused = [], []
            for url, answer in zip(left, store.run([Call(url) for url in left]), strict=True):
                if not isinstance(answer, BaseException):
                    _contents[url] = bytes(answer)
                elif is_missing(answer) or is_refused(answer):
                    _contents[url] = None
                    refused += [] if is_missing(answer) else [url]
                else:
                    failed.append(Failed(url, answer))
            if refused:
                logger.info(
                    "%s and %d more manifests are taken as not there: the store gives no right to read them",
                    *(redacted(refused[0]), len(refused) - 1),
                )
            if failed:
                raise failed[0]

        until_done(attempt, own[0])


def optional_content(url: str) -> bytes | None:
    """Return the bytes of a small file; None where there is none. Raises like `look_up`."""
    look_up_contents([url])
    return _contents[url]


def _by_store(urls: Iterable[str]) -> list[tuple[Store, list[str]]]:
    stores: dict[Store, list[str]] = {}
    for url in dict.fromkeys(urls):
        stores.setdefault(store_of(url), []).append(url)
    return list(stores.items())


def _lookups(store: Store, urls: Sequence[str]) -> list[Any]:
    if urls:
        store.files.invalidate_cache()  # of listings that a driver would answer from
    return store.run([Call(url, is_lookup=True) for url in urls])


def _no_right(url: str, error: BaseException) -> InputError:
    return InputError(f"{redacted(url)} cannot be used ({reason_of(error)}); check its name, rights and credentials")


def _file_from(store: Store, url: str, info: dict[str, Any]) -> RemoteFile | None:
    if info.get("type") == "directory":
        return None
    size, version = info.get("size"), _version_of(info)
    if not isinstance(size, int):
        raise InputError(f"{redacted(url)}: its store states no size; serve it by one that does")
    if version is None and not store.has_warned_versionless:
        store.has_warned_versionless = True
        logger.warning("%s: its store states no version, so that a change of the file goes unnoticed", redacted(url))
    return RemoteFile(url, size, version, bool(size and version) and _refuses_others(store, url, str(version)))


def _version_of(info: dict[str, Any]) -> str | None:
    strong = next((str(info[name]) for name in _STRONG if info.get(name)), None)
    weak = next((str(info[name]) for name in _WEAK if info.get(name)), None)
    return strong or (f"{weak} {info['ino']}" if weak and "ino" in info else weak)


def _refuses_others(store: Store, url: str, version: str) -> bool:
    """Return whether a store refuses to read another version than one that is stated; tried once for each store."""
    if scheme_of(url) not in CONDITIONAL or not version.startswith('"'):  # a weak ETag matches nothing
        return False
    if store.refuses_others is None:
        (answer,) = store.run([Call(url, first=0, end=1, version=NO_SUCH_VERSION)])
        if not isinstance(answer, BaseException) or status_of(answer) in (400, 405, 501):
            store.refuses_others = False
            logger.debug("%s: its store reads any version; each read is followed by a look-up", redacted(url))
        elif is_other_version(answer):
            store.refuses_others = True
        else:
            raise Failed(url, answer)
    return store.refuses_others


# -- reading


def read_ranges(ranges: Sequence[Range]) -> list[bytes]:
    """Read ranges, many at once, each as long as it says.

    Raises:
        CorruptError: a file is no longer there, or has changed.
        InputError: a store does not serve ranges.
        FanformerError: a store did not serve a file for `PATIENCE_SECONDS`.
    """
    contents: list[bytes | None] = [None if each.length else b"" for each in ranges]
    numbers: dict[Store, list[int]] = {}
    for number, each in enumerate(ranges):
        if each.length:
            numbers.setdefault(store_of(each.file.url), []).append(number)
    for store, own in numbers.items():

        def attempt(store: Store = store, own: list[int] = own) -> None:
            left = {number: ranges[number] for number in own if contents[number] is None}
            came, failed = _requested(store, left)
            doubtful = {left[number].file for number, error in failed.items() if not is_late(error)}
            doubtful |= {each.file for number in came if not (each := left[number]).file.is_conditional}
            unknown = _refuse_changed(store, doubtful)
            for number, content in came.items():
                if (error := unknown.get(left[number].file)) is None or left[number].file.is_conditional:
                    contents[number] = content
                else:
                    failed[number] = error
            for number, error in failed.items():
                raise Failed(left[number].file.url, error)

        until_done(attempt, ranges[own[0]].file.url)
    return [content for content in contents if content is not None]


def _requested(store: Store, ranges: dict[int, Range]) -> tuple[dict[int, bytes], dict[int, BaseException]]:
    """Request ranges by number; returns what came, and what failed."""
    came: dict[int, bytes] = {}
    failed: dict[int, BaseException] = {}
    calls = [
        Call(file.url, False, offset, offset + count, file.version if file.is_conditional else None)
        for file, offset, count in ranges.values()
    ]
    for (number, (file, _, count)), answer in zip(ranges.items(), store.run(calls), strict=True):
        if isinstance(answer, BaseException):
            failed[number] = answer
        elif len(answer) > count:
            raise InputError(
                f"{file.path}: its store sends {len(answer)} bytes for a range of {count}, it does not serve ranges; "
                "serve it by one that does, or copy it to this machine"
            )
        elif len(answer) < count:
            failed[number] = OSError(f"{len(answer)} of {count} bytes came")
        else:
            came[number] = bytes(answer)
    return came, failed


def _refuse_changed(store: Store, files: Iterable[RemoteFile]) -> dict[RemoteFile, BaseException]:
    """Look files up again; returns those that could not be, with the reason.

    Raises:
        CorruptError: one is no longer there, or has changed.
    """
    unknown: dict[RemoteFile, BaseException] = {}
    versioned = [file for file in files if file.version is not None]
    for file, answer in zip(versioned, _lookups(store, [file.url for file in versioned]), strict=True):
        if isinstance(answer, BaseException) and not is_missing(answer):
            unknown[file] = answer
        elif isinstance(answer, BaseException):
            raise CorruptError(f"{file.path} is no longer there; put it back and resume")
        elif (answer.get("size"), _version_of(answer)) != (file.size, file.version):
            raise CorruptError(f"{file.path} is another file than when the run began; put it back and resume")
    return unknown


class _Prefetch(threading.local):
    """The ranges that a thread is about to read: noted while a reader is tried out, or fetched."""

    noted: list[Range] | None = None

    def __init__(self) -> None:
        self.fetched: dict[Range, bytes] = {}

    def read(self, wanted: Range) -> bytes:
        """Return a range's bytes; while ranges are noted, zeros."""
        if not wanted.length:
            return b""
        if self.noted is not None:
            self.noted.append(wanted)
            return bytes(wanted.length)
        content = self.fetched.get(wanted)
        return read_ranges([wanted])[0] if content is None else content


_PREFETCH = _Prefetch()


def read_together(function: Callable[[], Result]) -> Result:
    """Return what a function returns that reads remote files, after all that it reads was fetched at once.

    It is called twice, and must read the same both times, whatever it reads: the first time, all of it is zeros.

    Raises: like `read_ranges`, and what the function raises.
    """
    _PREFETCH.noted = []
    try:
        result = function()
        noted = list(dict.fromkeys(_PREFETCH.noted))
    finally:
        _PREFETCH.noted = None
    if not noted:
        return result
    _PREFETCH.fetched = dict(zip(noted, read_ranges(noted), strict=True))
    try:
        return function()
    finally:
        _PREFETCH.fetched = {}


def parts_of(file: RemoteFile, *, first: int = 0, end: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of a file in order, in parts that are fetched some at a time; raises like `read_ranges`."""
    end = file.size if end is None else end
    for begin in range(first, end, PART_BYTES * PARTS):
        last = min(end, begin + PART_BYTES * PARTS)
        yield from read_ranges([Range(file, at, min(PART_BYTES, last - at)) for at in range(begin, last, PART_BYTES)])


def copy_to(
    file: RemoteFile,
    path: Path,
    *,
    advance: Callable[[int], None] = lambda _bytes: None,
    sha256: str | None = None,
) -> str:
    """Copy a whole file to this machine, where it appears when it is complete; returns its hexadecimal SHA-256.

    Args:
        advance: is called with the bytes of each part.
        sha256: what it must have.

    Raises:
        InputError: this machine's disk does not take it.
        CorruptError: it has another SHA-256; or like `read_ranges`.
        FanformerError: like `read_ranges`.
    """
    digest, partial = hashlib.sha256(), temporary_name(path)
    try:
        with reported_as_local(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.unlink(missing_ok=True)
            partial.open("xb").close()
        for part in parts_of(file):
            with reported_as_local(path), partial.open("ab") as out:
                out.write(part)
            digest.update(part)
            advance(len(part))
        if sha256 not in (None, digest.hexdigest()):
            raise CorruptError(f"{file.path} has another SHA-256 than its manifest states; copy it there again")
        with reported_as_local(path):
            publish(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return digest.hexdigest()


def small_file(url: str, *, most_bytes: int) -> bytes:
    """Return the bytes of a file.

    Raises:
        OSError: it does not exist, or is larger.
        InputError, CorruptError, FanformerError: like `look_up` and `read_ranges`.
    """
    file = find(url)
    if file is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), redacted(url))
    if file.size > most_bytes:
        raise OSError(errno.EFBIG, f"it has {file.size} bytes, more than the {most_bytes} allowed", redacted(url))
    return b"".join(parts_of(file))


@contextmanager
def only_one_at_a_time(folder: Path) -> Iterator[None]:
    """Hold a folder of copies while it is filled, which is made if need be; other processes wait.

    Raises:
        InputError: it cannot be written.
    """
    with reported_as_local(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(folder / ".lock", wait=True)
    assert lock is not None
    try:
        yield
    finally:
        os.close(lock)
