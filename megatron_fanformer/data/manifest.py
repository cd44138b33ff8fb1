"""`PREFIX.manifest.json`: the inputs, settings, counts and checksums of token files.

A manifest is written after all other files, so that a prefix with a manifest is complete.
"""

from pathlib import Path
from typing import Literal

import msgspec

from megatron_fanformer.errors import CorruptError
from megatron_fanformer.stores import is_url

MANIFEST_SUFFIX = ".manifest.json"
Format = Literal["megatron", "npy"]
Learn = Literal["all", "last"]
TooLong = Literal["cut", "drop"]


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the manifest's parts. Reading ignores fields that other versions wrote."""


class FileRecord(_Part, frozen=True, kw_only=True):
    """One file as it was when the manifest was written. A path without a folder means the manifest's folder."""

    path: str
    bytes: int
    sha256: str


class InputRecord(FileRecord, frozen=True, kw_only=True):
    """One input file; if its modification time is the same, it need not be hashed again."""

    modified_ns: int


class TokenizerRecord(_Part, frozen=True, kw_only=True):
    """The tokenizer that made the tokens."""

    path: str
    sha256: str
    vocab_size: int
    eod_id: int


class ChatSettings(_Part, frozen=True, kw_only=True):
    """The settings that determine token files of chats, beside `Settings`."""

    template: str
    """The template itself, in Jinja."""
    template_variables: dict[str, str]
    """The special tokens that it may use: bos_token, eos_token, pad_token, unk_token."""
    learn: Learn
    max_tokens: int | None
    """The most tokens of a conversation; in the format npy, the tokens of each row."""
    too_long: TooLong
    """What happens to a conversation with more tokens: cut or drop."""
    pad_id: int | None
    """The id that pads the rows of the format npy; None: the files have no padding."""


class Settings(_Part, frozen=True, kw_only=True):
    """The settings that determine the bytes of token files, beside inputs and tokenizer."""

    text_field: str
    """The field that holds a document's text; empty if the inputs were conversations."""
    dtype: str
    format: Format = "megatron"
    npy_dtype: str | None = None
    """The type of the ids in the inputs, if these were headerless .npy files; else None."""
    chat: ChatSettings | None = None
    """Further settings, if the inputs were conversations; else None."""


class RefusedLine(_Part, frozen=True, kw_only=True):
    """A line that was refused. `line` counts from 1."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class Encoding(_Part, frozen=True, kw_only=True):
    """The software that computed the ids, which are the same with every backend."""

    backend: str
    """The library: gigatoken, tokenizers or sentencepiece."""
    reason: str | None = None
    """Why the fastest library did not compute the ids; None if it did, or if the user chose the library."""


class TokenFiles(_Part, frozen=True, kw_only=True):
    """The files of one prefix, with their counts."""

    prefix: str
    """The prefix without its folder."""
    documents: int
    tokens: int
    max_token_id: int
    files: dict[str, FileRecord]
    """File records by suffix: .bin and .idx (for chats .mask.bin, too), or .npy, or /input_ids.npy and /label_mask.npy;
    and .ledger.parquet, if there is a ledger."""
    learned_tokens: int | None = None
    """Learned tokens of chats; None for documents."""
    cut: int | None = None
    """The number of conversations that were cut; None for documents."""


class Manifest(_Part, frozen=True, kw_only=True, tag_field="kind", tag="preparation"):
    """The manifest of a preparation: lines_read == documents + the sum of refused."""

    lines_read: int
    documents: int
    tokens: int
    text_bytes: int
    max_token_id: int
    refused: dict[str, int]
    refused_examples: list[RefusedLine]
    settings: Settings
    tokenizer: TokenizerRecord
    encoding: Encoding
    inputs: list[InputRecord]
    outputs: list[TokenFiles]
    versions: dict[str, str]


def manifest_path(prefix: str) -> Path:
    """Return the path of the manifest of a prefix on this machine."""
    return Path(prefix + MANIFEST_SUFFIX)


def read_manifest(prefix: str) -> Manifest | None:
    """Return the manifest of a prefix, which may be a URL; None if there is none. Raises CorruptError if unreadable."""
    path = prefix + MANIFEST_SUFFIX
    try:
        if is_url(path):
            from megatron_fanformer.data.remote_files import read_small_files  # not above: slow to import

            (content,) = read_small_files([path])
        else:
            content = Path(path).read_bytes()
        return None if content is None else msgspec.json.decode(content, type=Manifest)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{path} is not a manifest ({error}); remove its prefix's files, prepare again") from error


def read_record(prefix: str) -> TokenFiles | None:
    """Return the record of a prefix's files in the prefix's manifest; None if there is no manifest or no record."""
    manifest = read_manifest(prefix)
    return find_record(prefix, manifest) if manifest else None


def manifest_for_file(prefix: str, suffix: str, size: int) -> tuple[Manifest, TokenFiles] | None:
    """Return a prefix's manifest and record if they describe PREFIX + `suffix` as a file of `size` bytes; else None.

    There may be no manifest, or one that belongs to a file that was replaced or renamed.
    """
    manifest = read_manifest(prefix)
    record = find_record(prefix, manifest) if manifest else None
    file = record.files.get(suffix) if record else None
    is_same_file = file is not None and file.bytes == size
    return (manifest, record) if manifest and record and is_same_file else None


def find_record(prefix: str, manifest: Manifest) -> TokenFiles | None:
    """Return a manifest's record of the files of exactly this prefix; None if there is none."""
    return next((output for output in manifest.outputs if output.prefix == Path(prefix).name), None)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of the manifest's file."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
