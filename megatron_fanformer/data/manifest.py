"""`PREFIX.manifest.json`: what token files were made of, by which settings, and what they hold.

It is written last, so that a prefix with a manifest is complete.
"""

import hashlib
from pathlib import Path

import msgspec

from megatron_fanformer.errors import CorruptError


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the manifest's parts."""


class FileRecord(_Part, frozen=True, kw_only=True):
    """One file as it was when the manifest was written."""

    path: str
    bytes: int
    sha256: str


class InputRecord(FileRecord, frozen=True, kw_only=True):
    """One input file; the modification time spares hashing it again."""

    modified_ns: int


class TokenizerRecord(_Part, frozen=True, kw_only=True):
    """The tokenizer that made the tokens."""

    path: str
    sha256: str
    vocab_size: int
    eod_id: int


class Settings(_Part, frozen=True, kw_only=True):
    """What, besides inputs and tokenizer, decides the token files' bytes."""

    text_field: str
    dtype: str


class RefusedLine(_Part, frozen=True, kw_only=True):
    """A line that is no document. `line` counts from 1."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class Outputs(_Part, frozen=True, kw_only=True):
    """The token files, by name within the manifest's folder."""

    bin: FileRecord
    idx: FileRecord


class Manifest(_Part, frozen=True, kw_only=True):
    """The whole of it: lines_read == documents + the sum of refused."""

    lines_read: int
    documents: int
    tokens: int
    text_bytes: int
    max_token_id: int
    refused: dict[str, int]
    refused_examples: list[RefusedLine]
    settings: Settings
    tokenizer: TokenizerRecord
    inputs: list[InputRecord]
    outputs: Outputs


def manifest_path(prefix: str) -> Path:
    """Where the manifest of a prefix stands."""
    return Path(prefix + ".manifest.json")


def read_manifest(prefix: str) -> Manifest | None:
    """The manifest of a prefix, or None where there is none. Raises CorruptError for an unreadable one."""
    path = manifest_path(prefix)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptError(f"{path} is no manifest ({error}): remove the prefix's files, prepare again") from error


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as the bytes of its file."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
