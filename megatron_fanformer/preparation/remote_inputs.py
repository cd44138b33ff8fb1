"""Input files on other stores, which a preparation reads as it reads files of this machine: from start to end."""

import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from megatron_fanformer.data.remote_files import RemoteFile, open_stream, parts_of
from megatron_fanformer.durable_files import sha256_of, sha256_of_pieces


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

    def open(self) -> io.BufferedReader:
        """Return its bytes; reading raises like `read_ranges`."""
        return open_stream(self.file)


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
    return sha256_of_pieces(parts_of(file.file)) if isinstance(file, RemoteInput) else sha256_of(file)
