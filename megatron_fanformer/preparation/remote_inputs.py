"""Input files on other stores, which a preparation reads as it reads files of this machine: from start to end."""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_fanformer.data.remote_files import PART_BYTES, PARTS, RemoteFile, parts_of
from megatron_fanformer.durable_files import sha256_of

SOUGHT_BYTES = 1 << 20  # of a request after a seek: a Parquet file is not read in order


@dataclass(frozen=True)
class RemoteInput:
    """A file on another store, with the part of a Path's interface that preparations use."""

    file: RemoteFile

    def __str__(self) -> str:
        return self.file.url

    @property
    def name(self) -> str:
        """Return the last part of its URL."""
        return self.file.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """Return what its name ends in, such as .gz."""
        return Path(self.name).suffix

    def stat(self) -> SimpleNamespace:
        """Return its size; in the place of the time of its last change a number that its version decides."""
        digest = hashlib.blake2b(str(self.file.version).encode(), digest_size=7).digest()
        return SimpleNamespace(st_size=self.file.size, st_mtime_ns=int.from_bytes(digest, "big"))

    def open(self) -> io.RawIOBase:
        """Return its bytes; reading raises like `read_ranges`."""
        return _Stream(self.file)


InputFile = Path | RemoteInput


def recorded_path(file: InputFile) -> str:
    """Return the path of an input in manifests, ledgers and lists: its URL, or its absolute path, however it was named.

    Links are kept, as other machines may have them lead elsewhere, but where `..` follows one, it is what the system
    takes it for.
    """
    if isinstance(file, RemoteInput):
        return str(file)
    folder = file.parent.resolve() if ".." in file.parent.parts else file.parent.absolute()
    return str(folder / file.name)


def input_sha256(file: InputFile) -> str:
    """Return the hexadecimal SHA-256 of an input."""
    if not isinstance(file, RemoteInput):
        return sha256_of(file)
    digest = hashlib.sha256()
    for part in parts_of(file.file):
        digest.update(part)
    return digest.hexdigest()


class _Stream(io.RawIOBase):
    """The bytes of a file, requested ahead while they are read in order."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at = file, 0
        self._first, self._held = 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._file.size - self._at)
        if wanted <= 0:
            return 0
        held_end = self._first + len(self._held)
        if not self._first <= self._at < held_end:
            ahead = PART_BYTES * PARTS // 2 if self._at == held_end else max(wanted, SOUGHT_BYTES)
            end = min(self._file.size, self._at + ahead)
            self._first, self._held = self._at, b"".join(parts_of(self._file, first=self._at, end=end))
        begin = self._at - self._first
        found = self._held[begin : begin + wanted]
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)
