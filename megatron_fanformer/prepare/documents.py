"""Document files, read once from start to end in blocks, and the documents in them.

A file holds JSON lines, rows of Parquet or one text, plain or compressed. Every line (or row) either is a document (an
object with a text, an id and a source, as in Dolma), or is refused with a reason; none is dropped silently. Several
threads may parse blocks. Memory is bounded by the size of a block or of the longest accepted line, uncompressed.
"""

import hashlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow
from isal import igzip
from isal.igzip_lib import IsalError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

from megatron_fanformer.durable_files import naming, regular_file
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.prepare.inputs import (
    COMPRESSIONS,
    PARQUET_SUFFIX,
    TEXT_SUFFIXES,
    InputFile,
    RemoteInput,
    recorded_path,
)

BLOCK_BYTES = 1 << 20
MAX_ROWS_PER_BLOCK = 256
ARRAY_OF_OBJECTS = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")

NOT_JSON = "not JSON"
NOT_AN_OBJECT = "not a JSON object"
NO_TEXT_FIELD = "no text field"
TEXT_NOT_A_STRING = "text is not a string"
EMPTY_TEXT = "empty text"
EMPTY_LINE = "empty line"
INVALID_UTF8 = "invalid UTF-8"
UNPAIRED_SURROGATE = "unpaired surrogate in the text"
TOO_LONG_TO_LOOK_AGAIN = "irregular, and too long to be looked at again"

# A longer line or text file is refused. In memory, a text may take four times its bytes, and its ids as many again.
MAX_LINE_BYTES = 128 << 20
TOO_LONG_A_LINE = f"above {MAX_LINE_BYTES >> 20} MiB"
# The first parse of a line builds only the fields that are needed. A second parse builds all of them, which takes up to
# 25 times the bytes of the line.
LOOK_AGAIN_BYTES = 8 << 20
# Python parses no integer of more digits (sys.int_info.default_max_str_digits); a document with one is not refused.
MAX_DIGITS = 4300

NOT_DECODED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
LINE_FEED, OPENING, CLOSING = b"\n{}"
# The types of an id or a source in the first parse, which must not build large objects; other types need the second.
Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Refusal:
    """A line that is not a document, with the reason."""

    reason: str


class Document(msgspec.Struct, frozen=True, gc=False):
    """The fields of a document that are kept."""

    text: str
    id: str | None
    source: str | None


class DocumentParser:
    """Extracts text, id and source from one line or row, and builds nothing else of the JSON object.

    Args:
        text_field: the field (the column) of the text. If that is `id`, documents have no id; if `source`, no source.

    Raises:
        InputError: `text_field` holds a quote, a backslash or a control character.
    """

    def __init__(self, text_field: str = "text") -> None:
        self._text_field = text_field
        self._other_fields = [name for name in ("id", "source") if name != text_field]
        fields: list[Any] = [("text", str), *((name, Scalar, None) for name in self._other_fields)]
        # `parse` reads the attributes `id` and `source`; one that is the field of the text becomes a constant None.
        constants: dict[str, Any] = {text_field: None} if text_field in ("id", "source") else {}
        try:
            line = msgspec.defstruct("Line", fields, rename={"text": text_field}, namespace=constants, gc=False)
        except ValueError as error:
            raise InputError(f"text_field {text_field!r} cannot be a field name: {error}") from error
        self._decoder: Any = msgspec.json.Decoder(line)

    def parse_at_once(self, block: bytes) -> list[Document | Refusal]:
        """Return what is on each line of a block; nothing if some line is not one object, which `parse` takes."""
        data = np.frombuffer(block, np.uint8)
        breaks = np.flatnonzero(data[:-1] == LINE_FEED)
        # Only between two objects does a brace, a line feed and a brace stand in JSON.
        if data[0] == OPENING and (data[breaks - 1] == CLOSING).all() and (data[breaks + 1] == OPENING).all():
            with suppress(*NOT_DECODED):
                if len(lines := self._decoder.decode_lines(block)) == len(breaks) + 1:
                    return [self.make_document(fields.text, fields.id, fields.source) for fields in lines]
        return []

    def parse(self, line: bytes) -> Document | Refusal:
        """Return the document on a line, or the reason to refuse the line; a line end does not matter."""
        try:
            fields = self._decoder.decode(line)
        except NOT_DECODED:
            return self._parse_again(line)
        return self.make_document(fields.text, fields.id, fields.source)

    def parse_text(self, data: bytes, id: str) -> Document | Refusal:
        """Return the document that a text file is, without a byte order mark, or the reason to refuse the file."""
        try:
            return self.make_document(data.decode("utf-8-sig"), id, None)
        except UnicodeDecodeError:
            return Refusal(INVALID_UTF8)

    def parse_rows(self, columns: Mapping[str, Any]) -> list[Document | Refusal]:
        """Return the document in each row of a Parquet file, or the refusal; `columns` are pyarrow arrays."""
        texts = _values(columns[self._text_field])
        ids, sources = (
            _values(columns[name]) if name in columns and name in self._other_fields else [None] * len(texts)
            for name in ("id", "source")
        )
        return [self.make_document(*row) for row in zip(texts, ids, sources, strict=True)]

    def columns(self, path: InputFile, schema: Any) -> list[str]:
        """Return the names of the columns to read from a Parquet file. Raises InputError if it has no text column."""
        names, field = schema.names, self._text_field
        if field not in names:
            raise InputError(f"{path} has no column {field!r}, only {', '.join(names)}; name one as text_field")
        kind = schema.field(field).type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
            raise InputError(f"column {field!r} of {path} holds {kind}, not text; name another as text_field")
        columns = [name for name in dict.fromkeys((field, "id", "source")) if name in names]
        # A nested id or source does not name a document.
        return [name for name in columns if not pyarrow.types.is_nested(schema.field(name).type)]

    def make_document(self, text: Any, id: Any, source: Any) -> Document | Refusal:
        """Return a document with these values, or the reason to refuse it."""
        if not isinstance(text, str):
            return Refusal(INVALID_UTF8 if text == b"" else TEXT_NOT_A_STRING)  # b"": see `_values`
        if not text:
            return Refusal(EMPTY_TEXT)
        if len(text) > MAX_LINE_BYTES:  # in a row of Parquet; too long lines were skipped before
            return Refusal(TOO_LONG_A_LINE)
        return Document(text, as_text(id), as_text(source))

    def _parse_again(self, line: bytes) -> Document | Refusal:
        """Parse a line that msgspec could not read, by the standard library."""
        fields = decode_irregular(line)
        if isinstance(fields, Refusal):
            return fields
        if self._text_field not in fields:
            return Refusal(NO_TEXT_FIELD)
        text = fields[self._text_field]
        if isinstance(text, str) and has_surrogate(text):
            return Refusal(UNPAIRED_SURROGATE)
        others = {name: fields.get(name) for name in self._other_fields}
        return self.make_document(text, others.get("id"), others.get("source"))


def _values(column: Any) -> list[Any]:
    """Return the values of a column; b"" stands for a text that is not valid UTF-8."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        if len(column) == 1:
            return [b""]
        return [value for row in range(len(column)) for value in _values(column.slice(row, 1))]


def decode_irregular(line: bytes) -> dict[str, Any] | Refusal:
    """Decode a line with the standard library's parser; return its object, or the reason to refuse the line.

    Unlike msgspec, this parser accepts NaN and Infinity, which Python's `json` writes.
    """
    if not line.strip():
        return Refusal(EMPTY_LINE)
    if len(line) > LOOK_AGAIN_BYTES:
        return Refusal(TOO_LONG_TO_LOOK_AGAIN)
    try:
        value = json.loads(line.decode("utf-8-sig"), parse_int=lambda n: int(n) if len(n) <= MAX_DIGITS else float(n))
    except UnicodeDecodeError:
        return Refusal(INVALID_UTF8)
    except (ValueError, RecursionError):
        return Refusal(NOT_JSON)
    return value if isinstance(value, dict) else Refusal(NOT_AN_OBJECT)


def has_surrogate(text: str) -> bool:
    """Return whether a text contains an unpaired surrogate, which UTF-8 cannot encode."""
    return not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text)


def as_text(value: Any) -> str | None:
    """Return an id or a source as text: other types become JSON, unpaired surrogates question marks."""
    if value is None or value == b"":  # b"": see `_values`
        return None
    if type(value) is str and value.isascii():
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode("utf-8", "replace").decode("utf-8")


# -- files


class WholeText(NamedTuple):
    """The uncompressed bytes of a text file, and the document's id: the path of the file in the manifest."""

    data: bytes
    id: str


Block = bytes | dict[str, Any] | WholeText | None
"""Consecutive lines of a file: lines of JSON; or rows of Parquet, as pyarrow arrays by column; or a text file, which
counts as one line; or None for a line that was skipped because of its length."""


def parse_block(block: Block, parser: Any) -> list[Any]:
    """Parse each line of a block with a `DocumentParser` or a `ChatParser`; return documents and refusals."""
    if block is None:
        return [Refusal(TOO_LONG_A_LINE)]
    if isinstance(block, dict):
        return list(parser.parse_rows(block))
    if isinstance(block, WholeText):
        return [parser.parse_text(*block)]
    if isinstance(parser, DocumentParser) and (outcomes := parser.parse_at_once(block)):
        return outcomes
    # A line feed at the end of the block does not start another line.
    return list(map(parser.parse, block.removesuffix(b"\n").split(b"\n")))


class DocumentFile:
    """One input file, read once from start to end; its bytes on disk are counted and hashed on the way.

    Args:
        columns: takes the path and the schema of a Parquet file, and returns the names of the columns to read.
    """

    def __init__(self, path: InputFile, columns: Callable[[InputFile, Any], list[str]]) -> None:
        self.path, self._columns = path, columns
        self.bytes_read = 0
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Return the hexadecimal SHA-256 of the bytes read so far: of the whole file once `blocks` is exhausted."""
        return self._digest.hexdigest()

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """Yield all lines of the file, in blocks of about `block_bytes` uncompressed bytes; a longer line is one block.

        Every member of a concatenated gzip file and every frame of a zstd file is read.

        Raises:
            CorruptError: a compressed or Parquet file is truncated or damaged.
            InputError: the file cannot be opened, is a JSON array, or has no text column.
            OSError: the system fails to read the file; the error names the file.
        """
        with naming(str(self.path)):
            if self.path.name.endswith(PARQUET_SUFFIX):
                yield from self._row_blocks()
            elif self.path.name.endswith(TEXT_SUFFIXES):
                yield from self._whole_text(block_bytes)
            else:
                yield from self._line_blocks(block_bytes)

    def _whole_text(self, block_bytes: int) -> Iterator[Block]:
        pieces, size = list[bytes](), 0
        with self._open() as raw, _decompressed(self.path, _Counted(raw, self)) as stream:
            while piece := stream.read(block_bytes):
                size += len(piece)
                pieces.append(piece)
                if size > MAX_LINE_BYTES:  # the remaining bytes are only hashed
                    pieces.clear()
        yield None if size > MAX_LINE_BYTES else WholeText(b"".join(pieces), recorded_path(self.path))

    def _line_blocks(self, block_bytes: int) -> Iterator[Block]:
        with self._open() as raw, _decompressed(self.path, _Counted(raw, self)) as stream:
            pending: list[bytes] = []  # chunks of a line whose end has not been read
            pending_bytes = 0
            is_skipping = False  # True while the rest of a too long line is skipped
            for number, chunk in enumerate(iter(partial(stream.read, block_bytes), b"")):
                if number == 0:
                    _refuse_array(self.path, chunk)
                if is_skipping:
                    _, line_feed, chunk = chunk.partition(b"\n")
                    if not line_feed:
                        continue
                    is_skipping = False
                    yield None
                end = chunk.rfind(b"\n") + 1
                if end:
                    yield b"".join([*pending, memoryview(chunk)[:end]])
                    pending, pending_bytes, chunk = [], 0, chunk[end:]
                pending.append(chunk)
                pending_bytes += len(chunk)
                if pending_bytes > MAX_LINE_BYTES:
                    pending, pending_bytes, is_skipping = [], 0, True
            if is_skipping:
                yield None
            elif rest := b"".join(pending):
                yield rest

    def _row_blocks(self) -> Iterator[Block]:
        from pyarrow import parquet  # takes a tenth of a second, and files of lines do not need it

        with self._open() as raw:
            try:
                file = parquet.ParquetFile(raw, pre_buffer=False, buffer_size=BLOCK_BYTES)
                names = self._columns(self.path, file.schema_arrow)
                for batch in file.iter_batches(_rows_per_block(file.metadata, names), columns=names, use_threads=False):
                    self.bytes_read = max(self.bytes_read, raw.tell())  # an estimate for the progress
                    yield dict(zip(batch.schema.names, batch.columns, strict=True))
            except (pyarrow.ArrowException, OSError) as error:
                if getattr(error, "errno", None) is not None:  # raised by the system, not by pyarrow
                    raise
                raise _damaged(self.path, "Parquet", " ".join(str(error).split())) from error
            # Parquet is not read in order, so a second pass over the whole file counts and hashes the bytes.
            self.bytes_read = 0
            raw.seek(0)
            while data := raw.read(BLOCK_BYTES):
                self.count(memoryview(data))

    def _open(self) -> io.RawIOBase | io.BufferedReader:
        if isinstance(self.path, RemoteInput):
            return self.path.open()
        try:
            return regular_file(self.path).open("rb", buffering=0)
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}") from error

    def count(self, data: memoryview) -> None:
        """Count and hash bytes that were read from the disk."""
        self.bytes_read += len(data)
        self._digest.update(data)


def _refuse_array(path: InputFile, start: bytes) -> None:
    """Raise InputError if a file is one JSON array of objects. If lines follow it, it is one refused line."""
    first_line, _, other_lines = start.lstrip().partition(b"\n")
    is_line_of_many = first_line.rstrip().endswith(b"]") and other_lines.strip()
    if ARRAY_OF_OBJECTS.match(start) and not is_line_of_many:
        raise InputError(f"{path} is one JSON array, and not an object a line; write a line for each, by jq -c '.[]'")


class _Counted(io.RawIOBase):
    """A raw file whose bytes are counted by a `DocumentFile` when a decompressor reads them."""

    def __init__(self, raw: Any, counter: DocumentFile) -> None:
        self._raw, self._counter = raw, counter

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size: int = self._raw.readinto(buffer)
        self._counter.count(memoryview(buffer)[:size])
        return size


@contextmanager
def _decompressed(path: InputFile, raw: _Counted) -> Iterator[Any]:
    """Yield a stream of the uncompressed bytes of a file. Raises CorruptError if the bytes are damaged."""
    kind = COMPRESSIONS.get(path.suffix)
    if kind is None:
        yield raw
        return
    stream: Any = igzip.IGzipFile(fileobj=raw) if kind == "gzip" else _ZstdFrames(raw)
    try:
        yield stream
        if not path.stat().st_size:  # igzip takes an empty file, which lacks even a header, for empty text
            raise EOFError
    except EOFError as error:
        raise CorruptError(f"{path} is truncated, its {kind} stream has no end; fetch it again") from error
    except (igzip.BadGzipFile, IsalError, zstd.ZstdError) as error:  # type: ignore[misc]  # IsalError's stub
        if getattr(error, "errno", None) is not None:  # raised by the system
            raise
        raise _damaged(path, kind, error) from error


def _damaged(path: InputFile, kind: str, reason: object) -> CorruptError:
    return CorruptError(f"{path} is damaged ({reason}), not a complete {kind} file; fetch it again")


class _ZstdFrames:
    """The uncompressed bytes of consecutive zstd frames. The standard library's reader ends silently at damage."""

    def __init__(self, raw: _Counted) -> None:
        self._raw, self._frame = raw, zstd.ZstdDecompressor()

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes, and none at the end. Raises EOFError if the last frame is not complete."""
        output = b""
        while not output:
            data = b""
            if self._frame.eof:
                data = self._frame.unused_data or self._raw.read(BLOCK_BYTES)
                if not data:
                    break
                self._frame = zstd.ZstdDecompressor()
            elif self._frame.needs_input:
                data = self._raw.read(BLOCK_BYTES)
                if not data:
                    raise EOFError
            output = self._frame.decompress(data, size)
        return output


def _rows_per_block(metadata: Any, names: Sequence[str]) -> int:
    """Return how many rows fit into a block if all are as large as the mean row of the row group with the largest."""
    max_row_bytes = 1.0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        group_bytes = sum(
            column.total_uncompressed_size
            for column in map(group.column, range(group.num_columns))
            if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in names)  # columns may be nested
        )
        max_row_bytes = max(max_row_bytes, group_bytes / max(1, group.num_rows))
    return max(1, min(MAX_ROWS_PER_BLOCK, int(BLOCK_BYTES / max_row_bytes)))


def read_documents(path: Path) -> Iterator[str | Refusal]:
    """Yield the text on each line of a file of documents, or the refusal of the line.

    Raises CorruptError, InputError or OSError if the file is damaged or cannot be read.
    """
    parser = DocumentParser()
    for block in DocumentFile(path, parser.columns).blocks():
        for outcome in parse_block(block, parser):
            yield outcome if isinstance(outcome, Refusal) else outcome.text
