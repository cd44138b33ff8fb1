"""Token files that are written to another store: prepared in a folder of this machine, then copied there.

    URL.bin, URL.idx, …        the files, as `PREFIX` would have them here
    URL.manifest.json          written last: without it, nothing is complete
    URL.upload.json            while they are copied: the files that were read back as they should be, and their SHA-256

A preparation that is cut off goes on with the files that are not there yet, from whichever machine: another one makes
the same bytes again. Stores have no locks: nothing keeps two machines from writing one prefix at a time.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megatron_fanformer.data.manifest import (
    MANIFEST_SUFFIX,
    FileRecord,
    Manifest,
    PartManifest,
    manifest_from,
    manifest_path,
    read_any_manifest,
)
from megatron_fanformer.durable_files import (
    empty,
    remove_with_lock,
    sha256_of,
    sha256_of_pieces,
    take_lock,
    write_atomically,
)
from megatron_fanformer.errors import CorruptError, InputError, InUseError
from megatron_fanformer.options import PROGRAM
from megatron_fanformer.preparation.assembly import part_prefix
from megatron_fanformer.preparation.token_writer import standing_suffixes
from megatron_fanformer.preparation.work_folder import LOCK
from megatron_fanformer.runtime.device import cache_folder
from megatron_fanformer.stores import (
    PAUSES_SECONDS,
    READ_BYTES,
    driver_of,
    is_url,
    make_folder,
    pieces,
    query,
    replace_file,
    scheme_of,
    send_file,
    url_problem,
)
from megatron_fanformer.terminal import plural, print_stderr, size

READ_ONLY = ("http", "https")
UPLOAD_SUFFIX = ".upload.json"
DATA_LAST = (".idx", MANIFEST_SUFFIX)
"""Files without which others are not read as a whole: copied after those."""

Result = TypeVar("Result")


class RemoteOutput:
    """The files of one prefix on another store. Every method is attempted again where the store fails.

    Raises:
        InputError: nothing can be written to the URL; there is no driver, no right to use it.
        FanformerError: the store cannot be reached.
    """

    def __init__(self, url: str) -> None:
        if scheme_of(url) in READ_ONLY:
            raise InputError(
                f"output {url} cannot be written: {scheme_of(url)} is only read; name s3://…, gs://… or a path"
            )
        if problem := url_problem("output", url, kind="the URL of a prefix, such as s3://bucket/tokens/web,"):
            raise InputError(problem)
        folder, _, self.name = url.rpartition("/")
        if self.name in ("", ".", "..") or folder.endswith("/"):
            raise InputError(f"output {url} names no prefix; name one in a bucket, such as s3://bucket/tokens/web")
        self.url = url

    # -- what is there

    def content(self, suffix: str) -> bytes | None:
        """Return the bytes of a small file; None where there is none."""
        return self._query(lambda files, root: _content(files, root + suffix))

    def manifest(self) -> Manifest | PartManifest | None:
        """Return the manifest; None where there is none. Raises CorruptError if it is unreadable."""
        content = self.content(MANIFEST_SUFFIX)
        return None if content is None else manifest_from(content, self.url + MANIFEST_SUFFIX)

    def has_manifest(self) -> bool:
        """Return whether there is a manifest."""
        return self._query(lambda files, root: _size(files, root + MANIFEST_SUFFIX)) is not None

    def missing(self, records: list[FileRecord]) -> str | None:
        """Return the URL of the first file that is not there with its size; None if all are."""

        def look(files: Any, root: str) -> str | None:
            folder = root.rpartition("/")[0]
            return next((each.path for each in records if _size(files, f"{folder}/{each.path}") != each.bytes), None)

        path = self._query(look)
        return None if path is None else f"{self.url.rpartition('/')[0]}/{path}"

    # -- before and while it is prepared

    def place(self, folder: Path | None) -> Path:
        """Return the folder of this machine in which it is prepared; `folder` as for `scratch`."""
        return (folder or cache_folder() / "prepare") / hashlib.sha256(self.url.encode()).hexdigest()[:16]

    def discard_scratch(self, folder: Path | None) -> None:
        """Remove what a process left that was killed after its very last step; `folder` as for `scratch`."""
        path = (place := self.place(folder)) / LOCK
        if place.exists() and (lock := take_lock(path, wait=False)) is not None:
            remove_with_lock(place, path, lock)

    @contextmanager
    def scratch(self, folder: Path | None) -> Iterator[str]:
        """Yield the prefix on this machine that is prepared; its folder stays where the block fails, to go on from.

        Args:
            folder: of such folders; None: in this user's cache.

        Raises:
            InUseError: another process of this machine prepares the same.
        """
        path = (place := self.place(folder)) / LOCK
        place.mkdir(parents=True, exist_ok=True)
        lock = take_lock(path, wait=False)
        if lock is None:
            raise InUseError(f"{self.url} is being written by another process; wait for it, or choose another prefix")
        try:
            self._make_ready()
            print_stderr(f"{PROGRAM}: preparing in {place}, which is then copied to {self.url}")
            yield str(place / self.name)
            empty(place, except_for=path)
        finally:
            if place.exists() and list(place.iterdir()) == [path]:
                remove_with_lock(place, path, lock)
            else:
                os.close(lock)

    def _make_ready(self) -> None:
        """Write and remove a file, in a folder that is made.

        Raises InputError for files that nobody began to copy, under the names of the output or of its first part.
        """

        def probe(files: Any, root: str) -> str | None:
            make_folder(files, root.rpartition("/")[0])
            files.pipe_file(f"{root}.probe", b"")
            _remove(files, f"{root}.probe")
            if _size(files, root + UPLOAD_SUFFIX) is not None:
                return None
            ends = (number + suffix for number in ("", part_prefix("", 0)) for suffix in standing_suffixes())
            return next((end for end in ends if _size(files, root + end) is not None), None)

        if (standing := self._query(probe)) is not None:
            raise InputError(
                f"{self.url}{standing} exists, and there is no manifest of a complete preparation; choose another"
                f" output prefix, or remove the files of {self.url}"
            )

    # -- when it is prepared

    def upload(self, prefix: str, manifest: Manifest) -> None:
        """Copy the files of a complete preparation, read each back, and write its manifest when all are as they should.

        Raises:
            CorruptError: a file here is not what its manifest states.
        """
        folder = Path(prefix).parent
        sums = {record.path: record.sha256 for output in manifest.outputs for record in output.files.values()}
        beside = [Path(prefix + ".blend"), *(manifest_path(str(folder / each.prefix)) for each in manifest.outputs)]
        sums |= {path.name: sha256_of(path) for path in beside if path.exists() and path != manifest_path(prefix)}
        done: dict[str, str] = {}
        with suppress(msgspec.MsgspecError, UnicodeDecodeError):  # else all is copied
            done = msgspec.json.decode(self.content(UPLOAD_SUFFIX) or b"{}", type=dict[str, str])
        left = [
            path
            for path, digest in sums.items()
            if done.get(path) != digest or self.missing([FileRecord(path=path, bytes=_bytes(folder / path), sha256="")])
        ]
        total = size(sum(_bytes(folder / path) for path in left))
        print_stderr(f"{PROGRAM}: copying {plural(len(left), 'file')}, {total}, to {self.url}")
        for path in sorted(left, key=lambda path: (path.endswith(DATA_LAST), path)):
            done.pop(path, None)
            self.write(UPLOAD_SUFFIX, msgspec.json.encode(done))
            self._send(folder / path, path, sums[path])
            done[path] = sums[path]
        self.write(UPLOAD_SUFFIX, msgspec.json.encode(done))
        self.write(MANIFEST_SUFFIX, manifest_path(prefix).read_bytes())
        self._query(lambda files, root: _remove(files, root + UPLOAD_SUFFIX))

    def write(self, suffix: str, content: bytes) -> None:
        """Write a small file, which appears as a whole."""

        def write(files: Any, root: str) -> None:
            path = root + suffix
            files.pipe_file(f"{path}.tmp", content)
            if _content(files, f"{path}.tmp") != content:
                raise OSError(f"{path} was written, and another one read back")
            replace_file(files, f"{path}.tmp", path)

        self._query(write)

    def _send(self, file: Path, name: str, sha256: str) -> None:
        def send(files: Any, root: str) -> None:
            path = f"{root.rpartition('/')[0]}/{name}"
            if "/" in name:
                make_folder(files, path.rpartition("/")[0])
            # An object appears when it is whole, a file of a folder with its first byte.
            new = path if files.async_impl else f"{path}.tmp"
            send_file(files, file, new)
            with files.open(new, "rb", block_size=READ_BYTES) as stream:
                found = sha256_of_pieces(pieces(stream))
            if found != sha256:
                if sha256_of(file) != sha256:
                    raise CorruptError(f"{file} has another SHA-256 than its manifest states; remove it, prepare again")
                raise OSError(f"{name} was written, and another one read back")
            if new != path:
                replace_file(files, new, path)

        self._query(send, pauses=PAUSES_SECONDS, patience=float("inf"))

    def _query(self, function: Callable[[Any, str], Result], **named: Any) -> Result:
        return query(self.url, lambda: function(*driver_of(self.url)), **named)


def output_manifest(prefix: str) -> Manifest | PartManifest | None:
    """Return the manifest of an output as it is now, here or on another store. Raises like `read_any_manifest`."""
    return RemoteOutput(prefix).manifest() if is_url(prefix) else read_any_manifest(prefix)


def is_complete(prefix: str) -> bool:
    """Return whether an output has its manifest, which comes last."""
    return RemoteOutput(prefix).has_manifest() if is_url(prefix) else manifest_path(prefix).exists()


def missing_output(prefix: str, manifest: Manifest) -> str | None:
    """Return the first file of an output that does not stand with its size; None if all do."""
    records = [record for output in manifest.outputs for record in output.files.values()]
    if is_url(prefix):
        return RemoteOutput(prefix).missing(records)
    files = ((Path(prefix).parent / record.path, record.bytes) for record in records)
    return next((str(path) for path, size in files if not path.is_file() or path.stat().st_size != size), None)


def output_content(prefix: str, suffix: str) -> bytes | None:
    """Return the bytes of a small file of an output; None where there is none."""
    if is_url(prefix):
        return RemoteOutput(prefix).content(suffix)
    with suppress(FileNotFoundError):
        return Path(prefix + suffix).read_bytes()
    return None


def write_output(prefix: str, suffix: str, content: bytes) -> None:
    """Write a small file of an output, which appears as a whole."""
    if is_url(prefix):
        RemoteOutput(prefix).write(suffix, content)
    else:
        write_atomically(Path(prefix + suffix), content)


def _content(files: Any, path: str) -> bytes | None:
    try:
        return bytes(files.cat_file(path))
    except FileNotFoundError:
        return None


def _remove(files: Any, path: str) -> None:
    with suppress(FileNotFoundError):  # an attempt before may have removed it
        files.rm_file(path)


def _size(files: Any, path: str) -> int | None:
    files.invalidate_cache()
    try:
        return int(files.info(path)["size"])
    except (FileNotFoundError, NotADirectoryError):
        return None


def _bytes(file: Path) -> int:
    return file.stat().st_size
