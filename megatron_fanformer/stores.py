"""Other stores, by fsspec: which paths are on one, their drivers, retries.

torch is not imported here, and fsspec where it is used: it takes a tenth of a second.
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
"""Pauses before the second attempt and the further ones."""
PATIENCE_SECONDS = 60.0
"""Time after which a waiting command stops trying: a driver may take minutes to report that nothing answers."""
DRIVER_ATTEMPTS = 2  # tries of a driver per request, within one attempt of ours
WRONG_URL = (FileNotFoundError, PermissionError)
"""Errors that mean a wrong URL or missing rights, not a failing store."""
READ_BYTES = 1 << 24
"""Bytes of one request, of a file that is read from start to end."""
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")
_PASSWORD = re.compile(r"://[^\s/:@]*:[^\s@]*@")
_EXTRAS = {"s3": "the extra `store`", "http": "the extra `http`", "https": "the extra `http`", "gs": "gcsfs"}

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def is_url(path: str | Path) -> bool:
    """Return whether a path is on another store."""
    return _SCHEME.match(str(path)) is not None


def url_problem(name: str, url: str | None) -> str | None:
    """Return the problem of a folder's URL in the configuration, which every checkpoint will hold, or None."""
    if url is None:
        return None
    if not is_url(url) or url.startswith("memory:") or "::" in url:
        return f"{name} is {redacted(url)}; it must be a folder's URL, such as s3://bucket/run or file:///disk/run"
    return password_problem(name, url)


def password_problem(name: str, url: str) -> str | None:
    """Return the line for a URL with a password, or None."""
    if not _PASSWORD.search(url):
        return None
    return (
        f"{name} is {redacted(url)} and holds a password, which every checkpoint would show; leave it out, and give"
        " it to the store's driver in its own way (its environment variables or files)"
    )


def driver_of(url: str) -> tuple[Any, str]:
    """Return a new filesystem of fsspec for a URL, and the path in it.

    Raises:
        InputError: its driver is not installed.
    """
    from fsspec.core import url_to_fs

    try:
        # A driver may connect when it is made: one that is kept for the next caller may have lost its connection.
        files, path = url_to_fs(url, skip_instance_cache=True)
    except (ImportError, ValueError) as error:
        needed = _EXTRAS.get(url.partition("://")[0], "it (for s3:// the extra `store`)")
        raise InputError(
            f"{redacted(url)} needs a driver that is not installed ({reason_of(error)}); install {needed}, or name "
            "another URL"
        ) from None
    if hasattr(files, "retries"):
        files.retries = DRIVER_ATTEMPTS  # s3fs has five, and botocore five of each: minutes where nothing answers
    return files, str(path).rstrip("/")


def query(
    url: str,
    function: Callable[[], Result],
    *,
    pauses: Sequence[float] | None = None,
    patience: float | None = None,
    report: Callable[[int, str], None] | None = None,
) -> Result:
    """Call a function that uses a store, and call it again after each of the pauses where it fails.

    Args:
        function: connects anew each time.
        pauses: in seconds; None: the first three of `PAUSES_SECONDS`.
        patience: in seconds since the first attempt began, after which none follows; None: `PATIENCE_SECONDS`.
        report: is called with the number of each attempt that failed, and why; None: it is logged.

    Raises:
        InputError: there is no driver for the URL, nothing of its name, or no right to use it.
        FanformerError: the store cannot be reached.
    """
    shown = redacted(url).rstrip("/")
    end = time.monotonic() + (PATIENCE_SECONDS if patience is None else patience)
    for attempt, pause in enumerate((*(PAUSES_SECONDS[:3] if pauses is None else pauses), None), 1):
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
            is_full = isinstance(error, OSError) and error.errno in NO_SPACE  # a further attempt fills but the log
            if pause is None or is_full or time.monotonic() > end:
                raise FanformerError(
                    f"{shown} cannot be reached ({reason}); check the store and the driver's settings, and start again"
                ) from error
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def pieces(stream: Any) -> Iterator[bytes]:
    """Yield the rest of an open file in blocks of READ_BYTES."""
    while piece := stream.read(READ_BYTES):
        yield piece


def names_in(files: Any, folder: str) -> list[str]:
    """Return the names in a folder of a driver's; none where there is no folder."""
    files.invalidate_cache()
    try:
        paths = files.ls(folder, detail=False)
    except FileNotFoundError:
        return []
    return [path.rstrip("/").rpartition("/")[2] for path in paths if path.rstrip("/") != folder]


def make_folder(files: Any, folder: str) -> None:
    """Make a folder, where there are folders. Its parent must exist: neither a bucket nor a mount point is made."""
    if "/" in folder:
        with suppress(FileExistsError):
            files.mkdir(folder, create_parents=False)


def reason_of(error: BaseException) -> str:
    """Return a driver's error on one line, without credentials."""
    text = " ".join(str(error).split()) or "no reason given"
    return redacted(f"{type(error).__name__}: {text}")[:300]


@contextmanager
def reported_as_local(path: Path) -> Iterator[None]:
    """Report failures of this machine's disk by InputError while a store is in use, not as the store's."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({error.strerror or error}); free space, check its rights, or name another"
        ) from error
