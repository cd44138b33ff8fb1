"""A run's checkpoints on another store, by fsspec: an object store such as S3, a mounted disk, another machine.

    URL/config.yaml, metrics.jsonl, recovery.jsonl    the run's own, as they were at the last copy
    URL/checkpoints/step-00000100/…                   the files of a checkpoint
    URL/checkpoints/step-00000100/manifest.json       written last and removed first: without it, there is none
    URL/checkpoints/latest                            the name of the newest one

Stores have no rename that is atomic, and no checksum that all of them share. So what was written is read back and
checked against the manifest before that is written; and what is read is as untrusted as any file: names and sizes are
the manifest's, which is checked like a local one's, and the files are checked against it before they get a
checkpoint's name.

torch is not imported here.
"""

import hashlib
import logging
import shutil
from collections.abc import Callable, Container
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from megatron_fanformer.checkpoint import store
from megatron_fanformer.checkpoint.manifest import (
    MANIFEST,
    FileSums,
    Manifest,
    check_files,
    check_stream,
    manifest_from,
)
from megatron_fanformer.durable_files import new_folder, regular_file
from megatron_fanformer.errors import CorruptError, InputError, redacted
from megatron_fanformer.options import PROGRAM
from megatron_fanformer.runtime.device import cache_folder
from megatron_fanformer.stores import (
    READ_BYTES,
    driver_of,
    is_url,
    make_folder,
    names_in,
    pieces,
    query,
    replace_file,
    reported_as_local,
    send_file,
)
from megatron_fanformer.terminal import print_stderr

THREADS = 2  # files at a time, where the driver takes several requests; s3fs holds up to 500 MB of each
MOST_MANIFEST_BYTES = 1 << 26
MOST_RECORD_BYTES = 1 << 30
RECORDS = (store.CONFIG, store.METRICS, store.RECOVERY)
"""The run's own files that accompany its checkpoints."""

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class RemoteRun:
    """A run's folder on another store, or one checkpoint of it.

    Every method raises what the driver does, where it fails; see `stores.query`.

    Raises:
        InputError: there is no driver for the URL.
    """

    def __init__(self, url: str) -> None:
        self.url = redacted(url).rstrip("/")
        self._files, self._root = driver_of(url)
        self._checkpoints = f"{self._root}/{store.CHECKPOINTS}"

    # -- what is there

    def candidates(self) -> list[str]:
        """Return the complete checkpoints that a run may go on from, the best first: `latest`'s, then those before
        it.
        """
        newest_first = [name for name in self._steps()[::-1] if self._is_complete(name)]
        named = self._latest()
        return [name for name in newest_first if named is None or name <= named]

    def holds(self, name: str, manifest: bytes) -> bool:
        """Return whether a complete checkpoint of this name and with this very manifest is there."""
        with suppress(FileNotFoundError):
            return self.manifest_of(name) == manifest
        return False

    def manifest_of(self, name: str) -> bytes:
        """Return the manifest of a checkpoint, as it is there, unchecked."""
        return self._content(f"{self._checkpoints}/{name}/{MANIFEST}", MOST_MANIFEST_BYTES)

    def _steps(self) -> list[str]:
        """Return all folders with a checkpoint's name, the oldest first."""
        return sorted(
            name for name in names_in(self._files, self._checkpoints) if store.step_of(Path(name)) is not None
        )

    def _is_complete(self, name: str) -> bool:
        try:
            self._files.info(f"{self._checkpoints}/{name}/{MANIFEST}")
        except (FileNotFoundError, NotADirectoryError):  # `exists` takes every failure for a no
            return False
        return True

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
            make_folder(self._files, folder)
        probe = f"{self._checkpoints}/.probe"
        self._files.pipe_file(probe, b"")
        self._files.rm_file(probe)

    def copy(
        self,
        checkpoint: Path,
        *,
        keep: int | None,
        advance: Callable[[], None] = lambda: None,
        verified: dict[str, FileSums] | None = None,
    ) -> None:
        """Copy a checkpoint of a run's folder, verify the copy, publish it, and remove all but the `keep` newest.

        Args:
            advance: is called after every part that was sent, read back or removed.
            verified: the files that were read back as they should be, which is noted here: an attempt that is given
                what the one before has noted sends only the others.

        Raises:
            CorruptError: the checkpoint itself is damaged; nothing is published.
        """
        try:
            content = regular_file(checkpoint / MANIFEST).read_bytes()
        except FileNotFoundError:
            missing = f"{checkpoint} has no {MANIFEST}, and cannot be copied; the next checkpoint will have one"
            raise CorruptError(missing) from None
        if not self.holds(checkpoint.name, content):
            manifest = manifest_from(content, checkpoint / MANIFEST)
            self._copy_files(checkpoint, manifest, advance, {} if verified is None else verified)
            path = f"{self._checkpoints}/{checkpoint.name}/{MANIFEST}"
            self._files.pipe_file(f"{path}.tmp", content)
            if self._content(f"{path}.tmp", len(content)) != content:
                raise OSError(f"{MANIFEST} was written, and another one read back")
            self._files.mv(f"{path}.tmp", path)  # it appears as a whole, in stores that are folders, too
        self._files.pipe_file(f"{self._checkpoints}/{store.LATEST}", f"{checkpoint.name}\n".encode())
        self._remove_old(checkpoint.name, keep, advance)

    def _copy_files(
        self, checkpoint: Path, manifest: Manifest, advance: Callable[[], None], verified: dict[str, FileSums]
    ) -> None:
        """Copy all files but the manifest; one that is there is removed first, and so is all that it does not name."""
        self.make_ready()
        folder = f"{self._checkpoints}/{checkpoint.name}"
        left = self._remove(checkpoint.name, except_for=manifest.files, advance=advance)
        make_folder(self._files, folder)

        def send(name: str) -> None:
            verified.pop(name, None)
            self._send(checkpoint / name, f"{folder}/{name}", advance)
            with self._files.open(f"{folder}/{name}", "rb", block_size=READ_BYTES) as stream:
                place = f"{self.url}/{store.CHECKPOINTS}/{checkpoint.name}/{name}"
                check_stream(place, pieces(stream, advance), manifest.files[name], manifest.block_bytes)
            verified[name] = manifest.files[name]

        try:
            done = {name for name in left if verified.get(name) == manifest.files[name]}
            self._side_by_side(send, [name for name in manifest.files if name not in done])
        except CorruptError as error:
            # raises, if it is the original that is damaged
            check_files(checkpoint, manifest, advance=lambda _bytes: advance())
            raise OSError(str(error)) from error
        for name in RECORDS:
            if (record := checkpoint.parent.parent / name).is_file():
                self._send_record(record, f"{self._root}/{name}", advance)

    def _send_record(self, record: Path, path: str, advance: Callable[[], None]) -> None:
        """Replace one of `RECORDS` as a whole: earlier checkpoints need it until then."""
        size, found = record.stat().st_size, 0  # a run goes on writing
        self._send(record, f"{path}.tmp", advance)
        with self._files.open(f"{path}.tmp", "rb", block_size=READ_BYTES) as stream, record.open("rb") as own:
            for piece in pieces(stream, advance):
                found += len(piece)
                if own.read(len(piece)) != piece:
                    break
            else:
                if found >= size:
                    replace_file(self._files, f"{path}.tmp", path)
                    return
        raise OSError(f"{record.name} was written, and another one read back")

    def _send(self, file: Path, path: str, advance: Callable[[], None]) -> None:
        send_file(self._files, file, path, advance)

    def _side_by_side(self, function: Callable[[str], None], names: list[str]) -> None:
        with ThreadPoolExecutor(THREADS if self._files.async_impl else 1) as threads:
            waiting = [threads.submit(function, name) for name in names]
            try:
                for done in waiting:
                    done.result()
            finally:
                for left in waiting:
                    left.cancel()

    def _remove_old(self, newest: str, keep: int | None, advance: Callable[[], None]) -> None:
        """Remove what is older than the `keep` newest, and what a copy that was cut off left."""
        names, complete = self._steps(), list[str]()
        for name in names:
            if self._is_complete(name):
                complete.append(name)
            advance()
        kept = [name for name in complete if name <= newest][-(keep or len(complete)) :]
        later = [name for name in complete if name > newest]  # of a run that was rewound
        for name in set(names).difference(kept, later):
            self._remove(name, advance=advance)

    def _remove(self, name: str, *, except_for: Container[str] = (), advance: Callable[[], None]) -> list[str]:
        """Remove a checkpoint's files, the manifest first, and its folder where nothing is left; returns what is."""
        folder = f"{self._checkpoints}/{name}"
        found = names_in(self._files, folder)

        def remove(file: str) -> None:
            with suppress(FileNotFoundError, IsADirectoryError):
                self._files.rm_file(f"{folder}/{file}")
            advance()

        if MANIFEST in found:
            remove(MANIFEST)
        self._side_by_side(remove, [file for file in found if file != MANIFEST and file not in except_for])
        if not except_for:
            with suppress(OSError, NotImplementedError):  # object stores have no folders
                self._files.rmdir(folder)
        return [file for file in found if file in except_for]

    # -- fetching from it

    def fetch(self, name: str, into: Path) -> Path:
        """Fetch a checkpoint into a folder of this machine; it gets its name there once it is verified.

        Raises: like `download`.
        """
        with ExitStack() as ending:
            with reported_as_local(into):
                folder = ending.enter_context(new_folder(into / name))
            self.download(name, folder)  # whose failures may be the store's
            with reported_as_local(into):
                ending.close()
        return into / name

    def download(self, name: str, folder: Path) -> None:
        """Fill an empty folder of this machine with a checkpoint's files, and verify them.

        Raises:
            CorruptError: it is damaged.
            InputError: there is no space for it, or the folder cannot be written.
        """
        content = self.manifest_of(name)
        try:
            manifest = manifest_from(content, folder / MANIFEST)
            if manifest.step != store.step_of(Path(name)):
                raise CorruptError(f"{folder} is of step {manifest.step}, another than its name says; remove it")
            with reported_as_local(folder):
                (folder / MANIFEST).write_bytes(content)
            self._download_files(name, manifest, folder)
            check_files(folder, manifest)
        except CorruptError as error:
            message = str(error).replace(str(folder), f"{self.url}/{store.CHECKPOINTS}/{name}")
            raise CorruptError(message) from None

    def _download_files(self, name: str, manifest: Manifest, folder: Path) -> None:
        needed, free = sum(file.bytes for file in manifest.files.values()), shutil.disk_usage(folder).free
        if needed > free:
            raise InputError(f"{self.url}: {name} has {needed} bytes, and {folder.parent} has {free} free; free space")

        def fetch(file: str) -> None:
            """Copy one file; if it is longer than the manifest says, no more than a byte too many."""
            limit = manifest.files[file].bytes + 1
            path = f"{self._checkpoints}/{name}/{file}"
            try:
                stream = self._files.open(path, "rb", block_size=READ_BYTES)
            except FileNotFoundError:
                raise CorruptError(f"{folder / file} is missing; use another") from None
            with reported_as_local(folder):
                (folder / file).open("xb").close()
            with stream:
                while limit and (block := stream.read(min(limit, READ_BYTES))):
                    with reported_as_local(folder), (folder / file).open("ab") as out:
                        out.write(block)
                    limit -= len(block)

        self._side_by_side(fetch, list(manifest.files))

    def fetch_record(self, name: str) -> bytes | None:
        """Return the content of one of `RECORDS`; None if it is not there."""
        try:
            return self._content(f"{self._root}/{name}", MOST_RECORD_BYTES)
        except FileNotFoundError:
            return None


def on_this_machine(path: str) -> str:
    """Return the path itself; of a URL, the copy of its checkpoint, which is fetched if it is not there yet."""
    if not is_url(path):
        return path
    return str(fetched(path, cache_folder(), lambda line: print_stderr(f"{PROGRAM}: {line}")))


def fetched(url: str, cache: Path, report: Callable[[str], None]) -> Path:
    """Return a copy on this machine of the checkpoint that a URL names: one, or the newest sound one of a run.

    Args:
        cache: the folder of such copies; one that has the manifest of the one there is not fetched again.
        report: is called with a line when one is fetched.

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

    def find(remote: RemoteRun) -> Path:
        """Return the copy of the named checkpoint, or of the newest sound one."""
        names = remote.candidates() if not is_checkpoint else [last]
        if not names:
            raise InputError(
                f"{remote.url} holds no checkpoint ({store.CHECKPOINTS}/step-…); name a run or one of them"
            )
        for name in names:
            try:
                return _cached(remote, name, cache, report)
            except FileNotFoundError:
                raise InputError(
                    f"{remote.url}: {name} has no {MANIFEST}, and is not a complete checkpoint; name another"
                ) from None
            except CorruptError as error:
                if name == names[-1]:
                    raise
                logger.warning("%s; taking the one before", error)
        raise AssertionError("there was a name")

    return query_remote(run_url.removesuffix(f"/{store.CHECKPOINTS}"), find)


def _cached(remote: RemoteRun, name: str, cache: Path, report: Callable[[str], None]) -> Path:
    digest = hashlib.sha256(remote.manifest_of(name)).hexdigest()[:16]
    folder = cache / digest
    if not (folder / name).is_dir():
        report(f"fetching {name} of {remote.url} to {folder}")
        try:
            remote.fetch(name, folder)
        except InputError:
            if not (folder / name).is_dir():  # else another process has fetched it meanwhile
                raise
    return folder / name


def query_remote(url: str, function: Callable[[RemoteRun], Result]) -> Result:
    """Call a function as `stores.query` does, with a new connection for each attempt. Raises like it."""
    return query(url, lambda: function(RemoteRun(url)))
