"""Documents in Dolma's format: one JSON object a line, in `.jsonl`, `.jsonl.gz` or `.json.gz` files.

A line is either a document or refused with a reason; no line is dropped without a word. Files are read as
blocks of whole lines, so that a block can be handed to another process unparsed and memory stays bounded by
the longest line.
"""

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from isal import igzip
from isal.igzip_lib import IsalError

from megatron_fanformer.errors import CorruptError, InputError

DOCUMENT_SUFFIXES = (".jsonl", ".jsonl.gz", ".json.gz")
BLOCK_BYTES = 1 << 19

NOT_JSON = "not JSON"
NOT_AN_OBJECT = "not a JSON object"
NO_TEXT_FIELD = "no text field"
TEXT_NOT_A_STRING = "text is not a string"
EMPTY_TEXT = "empty text"
EMPTY_LINE = "empty line"
INVALID_UTF8 = "invalid UTF-8"
UNPAIRED_SURROGATE = "unpaired surrogate in the text"


@dataclass(frozen=True)
class Refusal:
    """Why a line is not a document; one of this module's reasons."""

    reason: str


def expand_inputs(inputs: Iterable[str | Path]) -> list[Path]:
    """The document files that `inputs` name: files as given, folders as their document files, sorted by path.

    Raises:
        InputError: no input, a path that does not exist, a file of another kind, a folder without document
            files, or a file named twice.
    """
    files = [file for path in inputs for file in _expand(Path(path))]
    if not files:
        raise InputError("no input: name at least one document file or a folder of them")
    seen: set[Path] = set()
    for file in files:
        if file.resolve() in seen:
            raise InputError(f"{file} is named twice among the inputs: its documents would count double")
        seen.add(file.resolve())
    return files


def _expand(path: Path) -> list[Path]:
    kinds = ", ".join(DOCUMENT_SUFFIXES)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.name.endswith(DOCUMENT_SUFFIXES) and p.is_file())
        if not files:
            raise InputError(f"{path} holds no document file: a folder must hold {kinds} files")
        return files
    if not path.exists():
        raise InputError(f"{path} does not exist: give an existing document file or folder")
    if not path.name.endswith(DOCUMENT_SUFFIXES):
        raise InputError(f"{path} is no document file: its name must end in one of {kinds}")
    return [path]


class DocumentParser:
    """Takes the text out of one line; builds nothing else of the JSON object.

    Raises InputError for a `text_field` that holds a quote, a backslash or a control character.
    """

    def __init__(self, text_field: str = "text") -> None:
        self._text_field = text_field
        try:
            line = msgspec.defstruct("Line", [("text", str)], rename={"text": text_field})
        except ValueError as error:
            raise InputError(f"text_field {text_field!r} cannot be a field's name: {error}") from error
        self._decode: Callable[[bytes], Any] = msgspec.json.Decoder(line).decode

    def parse(self, line: bytes) -> str | Refusal:
        """The text of the document on `line` (without or with its line end), or why there is none."""
        try:
            text: str = self._decode(line).text
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self._look_again(line)
        return text or Refusal(EMPTY_TEXT)

    def _look_again(self, line: bytes) -> str | Refusal:
        """Name the reason; the standard library also takes what Python's own writer emits (NaN, Infinity)."""
        if not line.strip():
            return Refusal(EMPTY_LINE)
        try:
            document = json.loads(line.decode("utf-8-sig"))
        except UnicodeDecodeError:
            return Refusal(INVALID_UTF8)
        except (ValueError, RecursionError):
            return Refusal(NOT_JSON)
        return self._text_of(document)

    def _text_of(self, document: Any) -> str | Refusal:
        if not isinstance(document, dict):
            return Refusal(NOT_AN_OBJECT)
        if self._text_field not in document:
            return Refusal(NO_TEXT_FIELD)
        text = document[self._text_field]
        if not isinstance(text, str):
            return Refusal(TEXT_NOT_A_STRING)
        if any("\ud800" <= character <= "\udfff" for character in text):
            return Refusal(UNPAIRED_SURROGATE)
        return text or Refusal(EMPTY_TEXT)


def split_lines(block: bytes) -> list[bytes]:
    """The lines of a block; a line end at its end begins no further line."""
    lines = block.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


class DocumentFile:
    """One input file, read once from start to end; counts and hashes its bytes as they are on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the bytes read so far; of the whole file once `blocks` is exhausted."""
        return self._digest.hexdigest()

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
        """Blocks of whole lines, of about `block_bytes` uncompressed bytes (more where one line is longer).

        Every member of a concatenated gzip file is read. Raises CorruptError for a gzip file that is
        truncated or damaged, InputError for one that cannot be opened.
        """
        with self._open() as stream, _naming_corruption(self.path):
            pending: list[bytes] = []
            while chunk := stream.read(block_bytes):
                end = chunk.rfind(b"\n") + 1
                if not end:
                    pending.append(chunk)
                    continue
                yield b"".join([*pending, chunk[:end]])
                pending = [chunk[end:]]
            if rest := b"".join(pending):
                yield rest

    @contextmanager
    def _open(self) -> Iterator[io.BufferedIOBase | io.RawIOBase]:
        try:
            raw = self.path.open("rb", buffering=0)
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}") from error
        with raw:
            counted = _CountedReader(raw, self)
            yield igzip.IGzipFile(fileobj=counted) if self.path.name.endswith(".gz") else counted

    def count(self, data: memoryview) -> None:
        """Take note of `data`, read from the disk."""
        self.bytes_read += len(data)
        self._digest.update(data)


class _CountedReader(io.RawIOBase):
    """The file under a decompressor; tells the DocumentFile of every byte that passes."""

    def __init__(self, raw: io.FileIO, owner: DocumentFile) -> None:
        self._raw = raw
        self._owner = owner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = self._raw.readinto(buffer)
        self._owner.count(memoryview(buffer)[:size])
        return size


@contextmanager
def _naming_corruption(path: Path) -> Iterator[None]:
    try:
        yield
    except EOFError as error:
        raise CorruptError(f"{path} is truncated: its gzip stream has no end; fetch it again") from error
    except (igzip.BadGzipFile, IsalError) as error:  # type: ignore[misc]  # its stub has IsalError an instance
        raise CorruptError(f"{path} is damaged ({error}): no whole gzip file; fetch it again") from error


def read_documents(path: Path, text_field: str = "text") -> Iterator[str | Refusal]:
    """The documents of one file in order: the text of each line, or why the line is refused.

    Raises what `DocumentFile.blocks` raises.
    """
    parser = DocumentParser(text_field)
    for block in DocumentFile(path).blocks():
        yield from map(parser.parse, split_lines(block))
