"""Uses object stores and other places at URLs through fsspec: finds drivers, checks URLs, and retries.

fsspec is imported where it is used, as its import takes a tenth of a second.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from megatron_fanformer.durable_files import NO_SPACE
from megatron_fanformer.errors import FanformerError, InputError, redacted

PAUSES_SECONDS: tuple[float, ...] = (1, 2, 4, 8, 16, 32)
"""Pauses between one attempt and the next."""
PATIENCE_SECONDS = 60.0
"""Time in which attempts may begin: a driver may take minutes to report that nothing answers."""
WRONG_URL = (FileNotFoundError, PermissionError)
"""Errors that mean a wrong URL or missing rights, not a failing store."""
READ_BYTES = 1 << 24
"""Bytes of one request for a file that is read from start to end."""
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")
_PASSWORD = re.compile(r"://[^\s/:@]*:[^\s@]*@")
_EXTRAS = {"s3": "the extra `store`", "http": "the extra `http`", "https": "the extra `http`", "gs": "gcsfs"}

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def is_url(path: str | Path) -> bool:
    """Return whether a path is a URL."""
    return _SCHEME.match(str(path)) is not None


def url_problem(name: str, url: str | None) -> str | None:
    """Return the problem with a folder's URL in the configuration's field `name`, or None if the URL is right."""
    if url is None:
        return None
    if not is_url(url) or url.startswith("memory:") or "::" in url:  # memory: ends with the process, :: chains drivers
        return f"{name} is {redacted(url)}; it must be a folder's URL, such as s3://bucket/run or file:///disk/run"
    return password_problem(name, url)


def password_problem(name: str, url: str) -> str | None:
    """Return the problem with a password in the URL of the configuration's field `name`; None if there is none."""
    if not _PASSWORD.search(url):
        return None
    return (
        f"{name} is {redacted(url)} and holds a password, which every checkpoint would show; remove it from the URL, "
        "and give it to the store's driver by the driver's environment variables or files"
    )


def driver_of(url: str) -> tuple[Any, str]:
    """Return a new fsspec filesystem for a URL, and the URL's path in that filesystem.

    Raises InputError if the driver for the URL is not installed.
    """
    from fsspec.core import url_to_fs

    try:
        # Some drivers connect only when they are constructed: a cached driver may have lost the connection.
        files, path = url_to_fs(url, skip_instance_cache=True)
    except (ImportError, ValueError) as error:
        needed = _EXTRAS.get(url.partition("://")[0], "it (for s3:// the extra `store`)")
        raise InputError(
            f"{redacted(url)} needs a driver that is not installed ({reason_of(error)}); install {needed}, or name "
            "another URL"
        ) from None
    if hasattr(files, "retries"):
        files.retries = 2  # s3fs makes 5 attempts of 5 requests by botocore: minutes if nothing answers
    return files, str(path).rstrip("/")


def query(
    url: str,
    function: Callable[[], Result],
    *,
    pauses: Sequence[float] = PAUSES_SECONDS[:3],
    patience: float = PATIENCE_SECONDS,
    report: Callable[[int, str], None] | None = None,
) -> Result:
    """Call a function that uses a store, and return its result; if it fails, call it again after a pause.

    Args:
        function: must connect anew at each call.
        pauses: the seconds between attempts; there is one attempt more than pauses.
        patience: the seconds after which no attempt follows a failed one.
        report: is called with the number of a failed attempt and the reason; by default a warning is logged.

    Raises:
        InputError: the URL has no driver, does not exist, or may not be used.
        FanformerError: every attempt failed, or the disk is full.
    """
    shown = redacted(url).rstrip("/")
    end = time.monotonic() + patience
    for attempt, pause in enumerate((*pauses, None), 1):  # no pause follows the last attempt
        try:
            return function()
        except FanformerError:
            raise
        except WRONG_URL as error:
            raise InputError(f"{shown} cannot be used ({reason_of(error)}); check its name and rights") from error
        except Exception as error:  # drivers raise what they like
            reason = reason_of(error)
            if report is None:
                logger.warning("%s, attempt %d: %s", shown, attempt, reason)
            else:
                report(attempt, reason)
            is_disk_full = isinstance(error, OSError) and error.errno in NO_SPACE
            if pause is None or is_disk_full or time.monotonic() > end:
                raise FanformerError(
                    f"{shown} cannot be reached ({reason}); check the store and the driver's settings, and start again"
                ) from error
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def names_in(files: Any, folder: str) -> list[str]:
    """Return the names in a folder of an fsspec filesystem; none if the folder does not exist."""
    files.invalidate_cache()
    try:
        paths = files.ls(folder, detail=False)
    except FileNotFoundError:
        return []
    # Some stores list the folder itself, too.
    return [path.rstrip("/").rpartition("/")[2] for path in paths if path.rstrip("/") != folder]


def make_folder(files: Any, folder: str) -> None:
    """Make a folder in an fsspec filesystem. The parent must exist: neither buckets nor mount points are made."""
    if "/" in folder:  # otherwise `folder` is a bucket
        with suppress(FileExistsError):
            files.mkdir(folder, create_parents=False)


def reason_of(error: BaseException) -> str:
    """Return a driver's error on one line, without credentials."""
    text = " ".join(str(error).split()) or "no reason given"
    return redacted(f"{type(error).__name__}: {text}")[:300]


@contextmanager
def reported_as_local(path: Path) -> Iterator[None]:
    """Raise InputError in place of an OSError on a local file, which `query` would take for a failure of the store."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror or error}); free space, check its rights, or name another"
        ) from error
