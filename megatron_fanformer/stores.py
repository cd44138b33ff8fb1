"""Other stores, by fsspec: which paths are on one, their drivers, copies to them, retries.

torch is not imported here, and fsspec where it is used: it takes a tenth of a second.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from megatron_fanformer.durable_files import NO_SPACE, write_refusal
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
_NOT_A_STORE = ("memory",)  # gone with this process
_EXTRAS = {"s3": "the extra `store`", "http": "the extra `http`", "https": "the extra `http`", "gs": "gcsfs"}

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def is_url(path: str | Path) -> bool:
    """Return whether a path is on another store."""
    return _SCHEME.match(str(path)) is not None


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, such as s3."""
    match = _SCHEME.match(url)
    return match[1] if match else ""


def url_problem(name: str, url: str | None, *, kind: str = "a folder's URL, such as s3://bucket/run") -> str | None:
    """Return the problem of a URL in the configuration, which every checkpoint will hold; None if it has none."""
    if url is None:
        return None
    scheme = _SCHEME.match(url)
    if scheme is None or scheme[1] in _NOT_A_STORE or "::" in url:
        return f"{name} is {redacted(url)}; it must be {kind} or file:///disk/run"
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
        needed = _EXTRAS.get(scheme_of(url))
        raise InputError(
            f"{redacted(url)} needs a driver that is not installed ({reason_of(error)}); install "
            f"{needed or 'it (for s3:// the extra `store`)'}, or name another URL"
        ) from None
    if hasattr(files, "retries"):
        files.retries = DRIVER_ATTEMPTS  # s3fs has five, and botocore five of each: minutes where nothing answers
    return files, str(path).rstrip("/")


def with_attempts(
    function: Callable[[], Result],
    report: Callable[[int, str], None],
    pauses: Sequence[float] = PAUSES_SECONDS,
    final: tuple[type[Exception], ...] = (FanformerError,),
    patience: float = float("inf"),
) -> Result:
    """Call a function that uses a store, and call it again after each of the pauses where it fails.

    A store that is full is not tried again: it fills nothing but the log.

    Args:
        report: is called with the number of each attempt that failed, and why.
        final: the errors that would come again, and are not waited for.
        patience: in seconds since the first attempt began; after it, none follows.

    Raises:
        Exception: the driver's own, of the last attempt.
    """
    end = time.monotonic() + patience
    for attempt, pause in enumerate((*pauses, None), 1):
        try:
            return function()
        except final:
            raise
        except Exception as error:  # drivers raise what they like
            report(attempt, reason_of(error))
            is_full = isinstance(error, OSError) and error.errno in NO_SPACE
            if pause is None or is_full or time.monotonic() > end:
                raise
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def query(
    url: str,
    function: Callable[[], Result],
    *,
    pauses: Sequence[float] | None = None,
    patience: float | None = None,
    log: Callable[..., None] = logger.warning,
) -> Result:
    """Call a function as `with_attempts` does, for a command that waits: failures go to `log`, the last is ours.

    Args:
        function: connects anew each time.
        pauses, patience: as for `with_attempts`; None: the first three pauses, and `PATIENCE_SECONDS`.

    Raises:
        InputError: there is no driver for the URL, nothing of its name, or no right to use it.
        FanformerError: the store cannot be reached.
    """
    shown = redacted(url).rstrip("/")

    def report(attempt: int, reason: str) -> None:
        log("%s, attempt %d: %s", shown, attempt, reason)

    try:
        return with_attempts(
            function,
            report,
            PAUSES_SECONDS[:3] if pauses is None else pauses,
            final=(FanformerError, *WRONG_URL),
            patience=PATIENCE_SECONDS if patience is None else patience,
        )
    except FanformerError:
        raise
    except WRONG_URL as error:
        raise InputError(f"{shown} cannot be used ({reason_of(error)}); check its name and rights") from error
    except Exception as error:
        reason = f"{shown} cannot be reached ({reason_of(error)})"
        raise FanformerError(f"{reason}; check the store and the driver's settings, and start again") from error


# -- files of a driver, as `driver_of` returns it


def pieces(stream: Any, advance: Callable[[], None] = lambda: None) -> Iterator[bytes]:
    """Yield the rest of an open file in blocks of READ_BYTES; `advance` is called for each block."""
    while piece := stream.read(READ_BYTES):
        advance()
        yield piece


def names_in(files: Any, folder: str) -> list[str]:
    """Return the names in a folder; none where there is no folder."""
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


def send_file(files: Any, file: Path, path: str, advance: Callable[[], None] = lambda: None) -> None:
    """Copy a file of this machine there; `advance` is called after each part."""
    from fsspec.callbacks import Callback

    if files.async_impl:  # in parts, several at a time
        files.put_file(str(file), path, callback=Callback(hooks={"sent": lambda *_, **__: advance()}))
        return
    with file.open("rb") as stream, files.open(path, "wb") as out:  # these drivers' `put_file` says nothing
        for piece in pieces(stream, advance):
            out.write(piece)


def reason_of(error: BaseException) -> str:
    """Return a driver's error on one line, without credentials."""
    text = " ".join(str(error).split()) or "no reason given"
    return redacted(f"{type(error).__name__}: {text}")[:300]


@contextmanager
def reported_as_local(path: Path) -> Iterator[None]:
    """Report failures of this machine's disk as its own while a store is in use, not as the store's.

    Raises:
        InputError: it failed.
    """
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{path} cannot be written ({write_refusal(error, path)}); free space, check its rights, or name another"
        ) from error
