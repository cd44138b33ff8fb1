"""Copies of token files on other stores, in a folder of each node that its ranks and later runs share.

    FOLDER/KEY/name.bin, name.idx, name.manifest.json    a pair, or name.npy; KEY stands for URL and versions
    FOLDER/.uses/…                                       a file for each process that uses copies, locked while it lives
    FOLDER/.lock                                         held by the one process that copies or removes

A copy has its name once it is whole, of the size that the store states and of the SHA-256 that its manifest states.
What is cut off is copied again, file by file. Copies that no process uses make room for others, the least recently
used first.
"""

import functools
import hashlib
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_fanformer.data.blends import Blend, Source
from megatron_fanformer.data.file_tasks import Advance, FileTasks
from megatron_fanformer.data.manifest import MANIFEST_SUFFIX, token_files_record
from megatron_fanformer.data.npy_files import SUFFIXES
from megatron_fanformer.data.remote_files import RemoteFile, copy_to, find, look_up_contents, optional_content
from megatron_fanformer.durable_files import take_lock, write_atomically
from megatron_fanformer.errors import InputError, redacted
from megatron_fanformer.stores import is_url, reported_as_local

KEY = re.compile(r"[0-9a-f]{32}")  # the name of a folder of copies
POLL_SECONDS = 1.0
THREADS = 4  # files at a time, each in parts
USES, LOCK = ".uses", ".lock"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """A pair or a .npy file: its URL without a suffix, and its files by suffix."""

    prefix: str
    files: dict[str, RemoteFile]

    @functools.cached_property
    def key(self) -> str:
        """Return the name of its folder, which another version does not have."""
        known = " ".join([self.prefix, *(file.identity for file in self.files.values())])
        return hashlib.sha256(known.encode()).hexdigest()[:32]

    @property
    def size(self) -> int:
        """Return the bytes of its files."""
        return sum(file.size for file in self.files.values())


@dataclass(frozen=True)
class Staging:
    """The copies that a run needs on each of its nodes."""

    folder: Path
    most_bytes: int | None
    """Of all copies in the folder; None: as many as its disk takes."""
    entries: tuple[Entry, ...]

    def local(self, blend: Blend) -> Blend:
        """Return a blend whose sources are the copies."""
        paths = {entry.prefix: str(self._path(entry, "")) for entry in self.entries}

        def here(path: str) -> str:
            if not is_url(path):
                return path
            prefix, suffix = os.path.splitext(path) if path.endswith(SUFFIXES) else (path, "")
            return paths[prefix] + suffix

        return Blend([Source(tuple(map(here, source.paths))) for source in blend.sources], blend.weights)

    def stated(self, source: Source) -> Source:
        """Return a source of `local`'s blends with the URLs that its copies are of."""

        def there(path: str) -> str:
            prefix, suffix = os.path.splitext(path) if path.endswith(SUFFIXES) else (path, "")
            return self._urls[prefix] + suffix if prefix in self._urls else path

        return Source(tuple(map(there, source.paths)))

    @functools.cached_property
    def _urls(self) -> dict[str, str]:
        """The URLs that copies are of, both without a suffix."""
        return {str(self._path(entry, "")): entry.prefix for entry in self.entries}

    def refusal(self) -> str | None:
        """Return why the copies do not fit into the folder, all that is not in use removed; None: they do."""
        try:
            with self._held() as kept:
                return self._refusal(kept)
        except InputError as error:
            return str(error)

    def fill(self, *, is_first: bool = False) -> None:
        """Copy what is missing on this node; the copies are this process's to use until it ends.

        Args:
            is_first: whether this is the process that surveys the run's data, and reads the manifests beside them.

        Raises:
            InputError: there is no room for them, or the folder cannot be written.
            CorruptError: a file is not what its manifest states.
            FanformerError: a store does not serve a file.
        """
        with self._held() as kept:
            missing = [entry for entry in self.entries if not self._is_whole(entry)]
            manifests = self.entries if is_first else missing
            look_up_contents(entry.prefix + MANIFEST_SUFFIX for entry in manifests)
            if missing and (refusal := self._refusal(kept)):
                raise InputError(f"{refusal}; free space, raise data.staging_bytes, or set data.remote to ranged")
            with reported_as_local(self.folder):
                self._make_room(missing, kept)
                self._note_use()
                for entry in manifests:
                    self._copy_manifest(entry)
            self._copy(missing)
            with reported_as_local(self.folder):
                for entry in self.entries:
                    os.utime(self.folder / entry.key)  # when it was last used

    def _path(self, entry: Entry, suffix: str) -> Path:
        return self.folder / entry.key / (entry.prefix.rpartition("/")[2] + suffix)

    def _is_whole(self, entry: Entry) -> bool:
        paths = {suffix: self._path(entry, suffix) for suffix in entry.files}
        return all(path.is_file() and path.stat().st_size == entry.files[end].size for end, path in paths.items())

    @contextmanager
    def _held(self) -> Iterator[set[str]]:
        """Hold the folder; yields the keys of what other processes use."""
        with reported_as_local(self.folder):
            (self.folder / USES).mkdir(parents=True, exist_ok=True)
            lock = take_lock(self.folder / LOCK, wait=False)
            if lock is None:
                logger.info("%s: waiting for another process that copies token files to it", self.folder)
                while (lock := take_lock(self.folder / LOCK, wait=False)) is None:
                    time.sleep(POLL_SECONDS)
        assert lock is not None
        try:
            with reported_as_local(self.folder):
                used = self._used()
            yield used
        finally:
            os.close(lock)

    def _used(self) -> set[str]:
        keys: set[str] = set()
        for use in (self.folder / USES).iterdir():
            lock = take_lock(use, wait=False)
            if lock is None or str(use) in _uses:
                keys.update(json.loads(use.read_bytes() or b"[]"))
            else:
                use.unlink(missing_ok=True)  # its process has ended
            if lock is not None:
                os.close(lock)
        return keys

    def _note_use(self) -> None:
        """Note that this process uses the copies, for as long as it lives."""
        use = self.folder / USES / uuid.uuid4().hex
        lock = take_lock(use, wait=False)
        assert lock is not None, "nobody else knows its name"
        use.write_text(json.dumps([entry.key for entry in self.entries]))
        _uses[str(use)] = lock

    def _sizes(self) -> dict[Path, int]:
        """Return the bytes of each folder of copies, the least recently used first; other folders are not ours."""
        folders = sorted(
            (path for path in self.folder.iterdir() if KEY.fullmatch(path.name) and path.is_dir()),
            key=lambda path: path.stat().st_mtime,
        )
        return {path: sum(file.stat().st_size for file in path.iterdir()) for path in folders}

    def _refusal(self, kept: set[str]) -> str | None:
        own = {entry.key for entry in self.entries}
        sizes = self._sizes()
        staying = sum(size for path, size in sizes.items() if path.name in kept - own)
        needed = sum(entry.size for entry in self.entries)
        if self.most_bytes is not None and staying + needed > self.most_bytes:
            return (
                f"data.staging_bytes is {self.most_bytes}, and the run's token files have {needed}, beside {staying} "
                "that others use"
            )
        usable = shutil.disk_usage(self.folder).free + sum(sizes.values()) - staying
        if needed > usable:
            return (
                f"data.staging_path {self.folder} has room for {usable} bytes, and the run's token files have {needed}"
            )
        return None

    def _make_room(self, missing: Sequence[Entry], kept: set[str]) -> None:
        for folder in self._sizes():
            for left in folder.glob(".*.tmp"):  # of a process that was killed: this one holds the folder
                left.unlink()
        own, sizes = {entry.key for entry in self.entries}, self._sizes()
        begun = {entry.key for entry in missing}
        needed = sum(entry.size for entry in missing)
        total = sum(size for path, size in sizes.items() if path.name not in begun)
        for path, size in sizes.items():
            is_within = self.most_bytes is None or total + needed <= self.most_bytes
            if is_within and shutil.disk_usage(self.folder).free >= needed:
                return
            if path.name not in kept | own:
                logger.info("removing the copy %s, which no run uses", path)
                shutil.rmtree(path)
                total -= size

    def _copy(self, missing: Sequence[Entry]) -> None:
        if not missing:
            return
        message = f"copying token files to {str(self.folder).replace('%', '%%')}: %.0f%% of %.1f GB, %s left"
        tasks = FileTasks(sum(entry.size for entry in missing), message, threads=THREADS)
        tasks.run([functools.partial(self._copy_entry, entry) for entry in missing])

    def _copy_entry(self, entry: Entry, *, advance: Advance) -> None:
        record = token_files_record(entry.prefix)
        for suffix, file in entry.files.items():
            path = self._path(entry, suffix)
            if path.is_file() and path.stat().st_size == file.size:
                advance(file.size)
                continue
            stated = record.files[suffix].sha256 if record and suffix in record.files else ""
            found = copy_to(file, path, advance=advance, sha256=stated or None)
            logger.debug("copied %s to %s, SHA-256 %s", file.path, path, found)

    def _copy_manifest(self, entry: Entry) -> None:
        """Let the manifest beside a copy be the one on the store, or none: it comes before the files that it is of."""
        content, path = optional_content(entry.prefix + MANIFEST_SUFFIX), self._path(entry, MANIFEST_SUFFIX)
        if content is None:
            path.unlink(missing_ok=True)
        elif not (path.is_file() and path.read_bytes() == content):
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, content)


_uses: dict[str, int] = {}
"""The locks of this process's uses, by the path of their file; a forked process holds them, too."""


def staging_of(sources: Sequence[Source], folder: Path, most_bytes: int | None) -> Staging:
    """Return the copies that sources need; what of them is on other stores was looked up.

    Raises:
        InputError: a file does not exist.
    """
    entries: dict[str, Entry] = {}
    for source in sources:
        for path in filter(is_url, source.paths):
            prefix, *suffixes = os.path.splitext(path) if source.is_npy else (path, ".bin", ".idx")
            files: dict[str, RemoteFile] = {}
            for suffix in suffixes:
                if (file := find(prefix + suffix)) is None:
                    raise InputError(f"{redacted(prefix)}{suffix} does not exist; name token files that do")
                files[suffix] = file
            entries[path] = Entry(prefix, files)
    return Staging(folder, most_bytes, tuple(entries.values()))
