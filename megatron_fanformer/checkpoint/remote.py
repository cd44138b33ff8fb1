"""A run's checkpoints on another store, by fsspec: an object store such as S3, a mounted disk, another machine.

    URL/config.yaml, metrics.jsonl, recovery.jsonl    the run's own, as they were at the last copy
    URL/checkpoints/step-00000100/…                   the files of a checkpoint
    URL/checkpoints/step-00000100/manifest.json       written last and removed first: without it, it is no checkpoint
    URL/checkpoints/latest                            the name of the newest one

Stores have no rename that is atomic, and no checksum that all of them share. So what was written is read back and held
against the manifest before that is written; and what is read is as untrusted as any file: names and sizes are the
manifest's, which is checked like a local one's, and the files are held against it before they get a checkpoint's name.

torch is not imported here.
"""

import hashlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from megatron_fanformer.checkpoint import store
from megatron_fanformer.checkpoint.manifest import MANIFEST, Manifest, check_files, check_stream, read_manifest
from megatron_fanformer.durable_files import new_folder
from megatron_fanformer.errors import CorruptError, FanformerError, InputError, redacted

THREADS = 2  # files at a time, where the driver takes several requests; s3fs holds up to 500 MB of each
READ_BYTES = 1 << 24  # of one request
MOST_MANIFEST_BYTES = 1 << 26
MOST_RECORD_BYTES = 1 << 30
RECORDS = (store.CONFIG, store.METRICS, store.RECOVERY)
"""The run's own files that accompany its checkpoints."""
PAUSES_SECONDS: tuple[float, ...] = (1, 2, 4, 8, 16, 32)
"""Before each further attempt at what a store refused."""
_WRONG = (FileNotFoundError, PermissionError)  # with the URL, not with the store
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://")
_PASSWORD = re.compile(r"://[^\s/:@]*:[^\s@]*@")
_NOT_A_STORE = ("memory",)  # gone with this process

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def is_url(path: str | Path) -> bool:
    """Whether a path is on another store."""
    return _SCHEME.match(str(path)) is not None


def url_problem(name: str, url: str | None) -> str | None:
    """What is wrong with the URL in a field of the configuration, which becomes part of every checkpoint."""
    if url is None:
        return None
    scheme = _SCHEME.match(url)
    if scheme is None or scheme[1] in _NOT_A_STORE or "::" in url:
        return f"{name} is {redacted(url)}; it must be a folder's URL, such as s3://bucket/run or file:///disk/run"
    if _PASSWORD.search(url):
        return (
            f"{name} is {redacted(url)} and holds a password, which every checkpoint would show; leave it out, and give"
            " it to the store's driver in its own way (its environment variables or files)"
        )
    return None


def with_attempts(
    function: Callable[[], Result],
    tell: Callable[[int, str], None],
    pauses: Sequence[float] = PAUSES_SECONDS,
    final: tuple[type[Exception], ...] = (FanformerError,),
) -> Result:
    """What a function returns that asks a store, which is asked again after each of the pauses where it fails.

    Args:
        final: the errors that would come again, and are not waited for.
        tell: is called with the number of each attempt that failed, and why.

    Raises:
        Exception: the driver's own, of the last attempt.
    """
    for attempt, pause in enumerate((*pauses, None), 1):
        try:
            return function()
        except final:
            raise
        except Exception as error:  # drivers raise what they like
            tell(attempt, reason_of(error))
            if pause is None:
                raise
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def reason_of(error: Exception) -> str:
    """A driver's error on one line, without credentials."""
    text = " ".join(str(error).split()) or "no reason given"
    return redacted(f"{type(error).__name__}: {text}")[:300]


class RemoteRun:
    """A run's folder on another store, or one checkpoint of it.

    Every method raises what the driver does, where it fails; see `with_attempts`.

    Raises:
        InputError: there is no driver for the URL.
    """

    def __init__(self, url: str) -> None:
        self.url = redacted(url).rstrip("/")
        self._files, self._root = _driver(url)
        self._checkpoints = f"{self._root}/{store.CHECKPOINTS}"

    # -- what is there

    def candidates(self) -> list[str]:
        """The complete checkpoints that a run may go on from, the best first: `latest`'s, then those before it."""
        newest_first = [name for name in self._steps()[::-1] if self._is_complete(name)]
        named = self._latest()
        return [name for name in newest_first if named is None or name <= named]

    def holds(self, checkpoint: Path) -> bool:
        """Whether a complete checkpoint of this name and these very contents is there."""
        with suppress(FileNotFoundError):
            return self.manifest_of(checkpoint.name) == (checkpoint / MANIFEST).read_bytes()
        return False

    def manifest_of(self, name: str) -> bytes:
        """The manifest of a checkpoint, as it is there, unchecked."""
        return self._content(f"{self._checkpoints}/{name}/{MANIFEST}", MOST_MANIFEST_BYTES)

    def _steps(self) -> list[str]:
        """All folders with a checkpoint's name, the oldest first."""
        return sorted(name for name in self._names(self._checkpoints) if store.step_of(Path(name)) is not None)

    def _names(self, folder: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            found = self._files.ls(folder, detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/").rpartition("/")[2] for path in found if path.rstrip("/") != folder]

    def _is_complete(self, name: str) -> bool:
        return bool(self._files.exists(f"{self._checkpoints}/{name}/{MANIFEST}"))

    def _latest(self) -> str | None:
        try:
            name = self._content(f"{self._checkpoints}/{store.LATEST}", store.POINTER_BYTES).decode().strip()
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        return name if store.step_of(Path(name)) is not None and "/" not in name else None

    def _content(self, path: str, most_bytes: int) -> bytes:
        with self._files.open(path, "rb") as stream:
            content = stream.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise CorruptError(f"{self.url}: {path} has more than {most_bytes} bytes; remove it")
        return bytes(content)

    # -- copying to it

    def make_ready(self) -> None:
        """Make the folder, in one that exists, and write and remove a file."""
        for folder in (self._root, self._checkpoints):
            self._make_folder(folder)
        probe = f"{self._checkpoints}/.probe"
        self._files.pipe_file(probe, b"")
        self._files.rm_file(probe)

    def copy(self, checkpoint: Path, *, keep: int | None, advance: Callable[[], None] = lambda: None) -> None:
        """Copy a checkpoint of a run's folder, verify the copy, publish it, and remove all but the `keep` newest.

        Args:
            advance: is called after every part that was sent or read back.

        Raises:
            CorruptError: the checkpoint itself is damaged; nothing is published.
        """
        if not self.holds(checkpoint):
            self._copy_files(checkpoint, advance)
            manifest = (checkpoint / MANIFEST).read_bytes()
            path = f"{self._checkpoints}/{checkpoint.name}/{MANIFEST}"
            self._files.pipe_file(f"{path}.tmp", manifest)
            if self._content(f"{path}.tmp", len(manifest)) != manifest:
                raise OSError(f"{MANIFEST} was written, and another one read back")
            self._files.mv(f"{path}.tmp", path)  # it appears as a whole, in stores that are folders, too
        self._files.pipe_file(f"{self._checkpoints}/{store.LATEST}", f"{checkpoint.name}\n".encode())
        self._remove_old(checkpoint.name, keep)

    def _copy_files(self, checkpoint: Path, advance: Callable[[], None]) -> None:
        """All files but the manifest; one that is there is removed first, and so is all that it does not name."""
        from fsspec.callbacks import Callback

        manifest = read_manifest(checkpoint)
        if manifest is None:
            raise CorruptError(
                f"{checkpoint} has no {MANIFEST}, and cannot be copied; the next checkpoint will have one"
            )
        self.make_ready()
        folder = f"{self._checkpoints}/{checkpoint.name}"
        self._remove(checkpoint.name, except_for=manifest.files)
        self._make_folder(folder)
        transfer = Callback(hooks={"sent": lambda *_, **__: advance()})

        def send(name: str) -> None:
            self._files.put_file(str(checkpoint / name), f"{folder}/{name}", callback=transfer)
            with self._files.open(f"{folder}/{name}", "rb", block_size=READ_BYTES) as stream:
                place = f"{self.url}/{store.CHECKPOINTS}/{checkpoint.name}/{name}"
                check_stream(place, _pieces(stream, advance), manifest.files[name], manifest.block_bytes)

        try:
            self._side_by_side(send, list(manifest.files))
        except CorruptError as error:
            check_files(checkpoint, manifest)  # raises, if it is the original that is damaged
            raise OSError(str(error)) from error
        for name in RECORDS:
            if (record := checkpoint.parent.parent / name).is_file():
                self._files.put_file(str(record), f"{self._root}/{name}")

    def _side_by_side(self, function: Callable[[str], None], names: list[str]) -> None:
        with ThreadPoolExecutor(THREADS if self._files.async_impl else 1) as threads:
            waiting = [threads.submit(function, name) for name in names]
            try:
                for done in waiting:
                    done.result()
            finally:
                for left in waiting:
                    left.cancel()

    def _make_folder(self, folder: str) -> None:
        """Where there are folders. The one that it is in must exist: neither a bucket nor a mount point is made."""
        if "/" in folder:
            with suppress(FileExistsError):
                self._files.mkdir(folder, create_parents=False)

    def _remove_old(self, newest: str, keep: int | None) -> None:
        """Remove what is older than the `keep` newest, and what a copy that was cut off left."""
        names = self._steps()
        complete = [name for name in names if self._is_complete(name)]
        kept = [name for name in complete if name <= newest][-(keep or len(complete)) :]
        later = [name for name in complete if name > newest]  # of a run that was rewound
        for name in set(names).difference(kept, later):
            self._remove(name)

    def _remove(self, name: str, except_for: Any = ()) -> None:
        """Remove a checkpoint's files, the manifest first, and its folder where nothing is left."""
        folder = f"{self._checkpoints}/{name}"
        left = set(self._names(folder)) - set(except_for)
        for file in sorted(left, key=lambda file: file != MANIFEST):
            with suppress(FileNotFoundError, IsADirectoryError):
                self._files.rm_file(f"{folder}/{file}")
        if not except_for:
            with suppress(OSError, NotImplementedError):  # object stores have no folders
                self._files.rmdir(folder)

    # -- fetching from it

    def fetch(self, name: str, into: Path) -> Path:
        """Fetch a checkpoint into a folder of this machine; it gets its name there once it is verified.

        Raises:
            CorruptError: it is damaged.
            InputError: there is no space for it.
        """
        with new_folder(into / name) as folder:
            (folder / MANIFEST).write_bytes(self.manifest_of(name))
            try:
                manifest = read_manifest(folder)
                assert manifest is not None
                if manifest.step != store.step_of(Path(name)):
                    raise CorruptError(f"{folder} is of step {manifest.step}, another than its name says; remove it")
                self._fetch_files(name, manifest, folder)
                check_files(folder, manifest)
            except CorruptError as error:
                told = str(error).replace(str(folder), f"{self.url}/{store.CHECKPOINTS}/{name}")
                raise CorruptError(told) from None
        return into / name

    def _fetch_files(self, name: str, manifest: Manifest, folder: Path) -> None:
        needed, free = sum(file.bytes for file in manifest.files.values()), shutil.disk_usage(folder).free
        if needed > free:
            raise InputError(f"{self.url}: {name} has {needed} bytes, and {folder.parent} has {free} free; free space")

        def fetch(file: str) -> None:
            limit = manifest.files[file].bytes + 1  # one more shows that it is too long
            path = f"{self._checkpoints}/{name}/{file}"
            try:
                stream = self._files.open(path, "rb", block_size=READ_BYTES)
            except FileNotFoundError:
                raise CorruptError(f"{folder / file} is missing; use another") from None
            with stream, (folder / file).open("xb") as out:
                while limit and (block := stream.read(min(limit, READ_BYTES))):
                    out.write(block)
                    limit -= len(block)

        self._side_by_side(fetch, list(manifest.files))

    def fetch_record(self, name: str) -> bytes | None:
        """The content of one of `RECORDS`; None if it is not there."""
        try:
            return self._content(f"{self._root}/{name}", MOST_RECORD_BYTES)
        except FileNotFoundError:
            return None


def fetched(url: str, cache: Path, tell: Callable[[str], None]) -> Path:
    """A copy on this machine of the checkpoint that a URL names: one, or the newest sound one of a run.

    Args:
        cache: the folder of such copies; one that has the manifest of the one there is not fetched again.
        tell: is called with a line when one is fetched.

    Raises:
        InputError: there is none, or no driver for the URL.
        CorruptError: it is damaged.
        FanformerError: the store cannot be reached.
    """
    if "::" in url:
        raise InputError(f"{redacted(url)} is a chain of URLs; name the store's own")
    parent, _, last = url.rstrip("/").rpartition("/")
    is_checkpoint = store.step_of(Path(last)) is not None
    run_url = parent.removesuffix(f"/{store.CHECKPOINTS}") if is_checkpoint else url.rstrip("/")
    remote = RemoteRun(run_url.removesuffix(f"/{store.CHECKPOINTS}"))

    def find() -> Path:
        names = remote.candidates() if not is_checkpoint else [last]
        if not names:
            raise InputError(
                f"{remote.url} holds no checkpoint ({store.CHECKPOINTS}/step-…); name a run or one of them"
            )
        for name in names:
            try:
                return _cached(remote, name, cache, tell)
            except FileNotFoundError:
                raise InputError(f"{remote.url}: {name} has no {MANIFEST}, and is no complete checkpoint") from None
            except CorruptError as error:
                if name == names[-1]:
                    raise
                logger.warning("%s; taking the one before", error)
        raise AssertionError("there was a name")

    return asked(remote, find)


def _cached(remote: RemoteRun, name: str, cache: Path, tell: Callable[[str], None]) -> Path:
    digest = hashlib.sha256(remote.manifest_of(name)).hexdigest()[:16]
    folder = cache / digest
    if not (folder / name).is_dir():
        tell(f"fetching {name} of {remote.url} to {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        remote.fetch(name, folder)
    return folder / name


def asked(remote: RemoteRun, function: Callable[[], Result]) -> Result:
    """`with_attempts` for a command that waits: each failure is told in the log, and the last is an error of ours."""

    def tell(attempt: int, reason: str) -> None:
        logger.warning("%s, attempt %d: %s", remote.url, attempt, reason)

    try:
        return with_attempts(function, tell, PAUSES_SECONDS[:3], (FanformerError, *_WRONG))
    except FanformerError:
        raise
    except _WRONG as error:
        raise InputError(f"{remote.url} cannot be used ({reason_of(error)}); check its name and rights") from error
    except Exception as error:
        reason = f"{remote.url} cannot be reached ({reason_of(error)})"
        raise FanformerError(f"{reason}; check the store and the driver's settings, and start again") from error


def _driver(url: str) -> tuple[Any, str]:
    """The filesystem of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    try:
        files, path = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise InputError(
            f"{redacted(url)} needs a driver that is not installed ({reason_of(error)}); install it (for s3:// the "
            "extra `store`), or name another URL"
        ) from None
    return files, str(path).rstrip("/")


def _pieces(stream: Any, advance: Callable[[], None]) -> Iterator[bytes]:
    while piece := stream.read(READ_BYTES):
        advance()
        yield piece
