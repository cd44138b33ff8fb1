"""`PREFIX.manifest.json`: the inputs and settings of token files, their counts and sums.

It is written last, so that a prefix with a manifest is complete.
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
    """Base of the manifest's parts. Fields of other versions are left out."""


class FileRecord(_Part, frozen=True, kw_only=True):
    """One file as it was when the manifest was written; a path without a folder is relative to the manifest's."""

    path: str
    bytes: int
    sha256: str


class InputRecord(FileRecord, frozen=True, kw_only=True):
    """One input file; the modification time avoids hashing it again."""

    modified_ns: int


class TokenizerRecord(_Part, frozen=True, kw_only=True):
    """The tokenizer that made the tokens."""

    path: str
    sha256: str
    vocab_size: int
    eod_id: int


class ChatSettings(_Part, frozen=True, kw_only=True):
    """The settings that determine the bytes of chats alone."""

    template: str
    """The template itself, in Jinja."""
    template_variables: dict[str, str]
    """The special tokens that it may use: bos_token, eos_token, pad_token, unk_token."""
    learn: Learn
    max_tokens: int | None
    """The most tokens of a conversation; with the format npy, those of each row."""
    too_long: TooLong
    """Treatment of a conversation of more tokens: cut or drop."""
    pad_id: int | None
    """The id that fills the rows of the format npy; None: the files are not padded."""


class Settings(_Part, frozen=True, kw_only=True):
    """The settings that, besides inputs and tokenizer, determine the token files' bytes."""

    text_field: str
    """The field of a document that is its text; empty where conversations were read."""
    dtype: str
    format: Format = "megatron"
    npy_dtype: str | None = None
    """The type of the tokens read, where the inputs were headerless .npy files and not documents."""
    chat: ChatSettings | None = None
    """Further settings where the inputs were conversations and not documents."""


class RefusedLine(_Part, frozen=True, kw_only=True):
    """A line that is not a document. `line` counts from 1."""

    file: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class Encoding(_Part, frozen=True, kw_only=True):
    """The software that computed the ids. They are the same for every backend."""

    backend: str
    """The library: gigatoken, tokenizers or sentencepiece."""
    reason: str | None = None
    """Why it is not the fastest one; None if it is, or if it was requested."""


class TokenFiles(_Part, frozen=True, kw_only=True):
    """The files of one prefix, with their counts."""

    prefix: str
    """The prefix without its folder."""
    documents: int
    tokens: int
    max_token_id: int
    files: dict[str, FileRecord]
    """File records by suffix: .bin and .idx, or .npy; .ledger.parquet where there is a ledger. For chats .mask.bin
    beside .bin and .idx, or /input_ids.npy and /label_mask.npy."""
    learned_tokens: int | None = None
    """Tokens that are learned, for chats."""
    cut: int | None = None
    """Conversations that lost their end, for chats."""


class Manifest(_Part, frozen=True, kw_only=True, tag_field="kind", tag="preparation"):
    """The manifest of a whole preparation: lines_read == documents + the sum of refused."""

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
    """Return the manifest of a prefix, which may be a URL; None where there is none, CorruptError if unreadable."""
    path = prefix + MANIFEST_SUFFIX
    try:
        if is_url(path):
            from megatron_fanformer.data.remote_files import optional_contents  # a help text needs none of its imports

            (content,) = optional_contents([path])
        else:
            content = Path(path).read_bytes()
        return None if content is None else msgspec.json.decode(content, type=Manifest)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{path} is not a manifest ({error}); remove its prefix's files, prepare again") from error


def token_files_record(prefix: str) -> TokenFiles | None:
    """Return the entry of a manifest for the files of exactly this prefix; None where there is no manifest of them."""
    manifest = read_manifest(prefix)
    return record_of(prefix, manifest) if manifest else None


def manifest_of(prefix: str, suffix: str, size: int) -> tuple[Manifest, TokenFiles] | None:
    """Return the manifest beside a file of token ids, of `size` bytes, and its entry for it.

    None where there is none, or it is another file's: one that was replaced, of another size, or under another name.
    """
    manifest = read_manifest(prefix)
    record = record_of(prefix, manifest) if manifest else None
    recorded = record.files.get(suffix) if record else None
    is_of_this = recorded is not None and recorded.bytes == size
    return (manifest, record) if manifest and record and is_of_this else None


def record_of(prefix: str, manifest: Manifest) -> TokenFiles | None:
    """Return a manifest's entry for the files of exactly this prefix; None where there is none."""
    return next((output for output in manifest.outputs if output.prefix == Path(prefix).name), None)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the manifest as the bytes of its file."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
