"""Document files, read once from start to end in blocks, and the documents on their lines.

Files are JSON lines, text (one document a file) or Parquet, plain or compressed. A line (in a Parquet file, a row) is
either a document, a JSON object with a text, an id and a source as in Dolma, or refused with a reason; none is dropped
silently. A block can be parsed on its own, by another thread. Memory is bounded by the block size, or by the longest
line that is accepted, however well the file is compressed.
"""

import hashlib
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from isal import igzip
from isal.igzip_lib import IsalError

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
ROWS_A_BLOCK = 256
ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")

NOT_JSON = "not JSON"
NOT_AN_OBJECT = "not a JSON object"
NO_TEXT_FIELD = "no text field"
TEXT_NOT_A_STRING = "text is not a string"
EMPTY_TEXT = "empty text"
EMPTY_LINE = "empty line"
INVALID_UTF8 = "invalid UTF-8"
UNPAIRED_SURROGATE = "unpaired surrogate in the text"
TOO_LONG_TO_LOOK_AGAIN = "irregular, and too long to be looked at again"

# A longer line or text file is refused. Its text may take four times its bytes, and its ids as much again.
MAX_LINE_BYTES = 128 << 20
TOO_LONG_A_LINE = f"above {MAX_LINE_BYTES >> 20} MiB"
# The first parse of a line builds only what is needed; a second one everything in it, up to 25 times its bytes.
LOOK_AGAIN_BYTES = 8 << 20
# The most digits of an integer that Python parses (sys.int_info.default_max_str_digits); the text beside it is good.
MAX_DIGITS = 4300

# The types of an id or a source in the first parse, which must not build anything large: others get the second.
Scalar = str | int | float | bool | None


@dataclass(frozen=True)
class Refusal:
    """A line that is not a document, with the reason."""

    reason: str


class Document(NamedTuple):
    """The fields of a document that are kept."""

    text: str
    id: str | None
    source: str | None


class DocumentParser:
    """Extract text, id and source from one line or row; build nothing else of the JSON object.

    Args:
        text_field: the field (the column) that holds the text; if it is `id` or `source`, documents have none.

    Raises:
        InputError: `text_field` holds a quote, a backslash or a control character.
    """

    def __init__(self, text_field: str = "text") -> None:
        self._text_field = text_field
        self._beside = [name for name in ("id", "source") if name != text_field]
        absent: dict[str, Any] = {name: None for name in ("id", "source") if name == text_field}
        fields: list[Any] = [("text", str), *((name, Scalar, None) for name in self._beside)]
        try:
            line = msgspec.defstruct("Line", fields, rename={"text": text_field}, namespace=absent)
        except ValueError as error:
            raise InputError(f"text_field {text_field!r} cannot be a field name: {error}") from error
        self._decode: Callable[[bytes], Any] = msgspec.json.Decoder(line).decode

    def parse(self, line: bytes) -> Document | Refusal:
        """Return the document on `line` (without or with its line end), or the reason that there is none."""
        try:
            fields = self._decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self._look_again(line)
        return self.judge(fields.text, fields.id, fields.source)

    def parse_text(self, data: bytes, id: str) -> Document | Refusal:
        """Return a text file as a document, without a byte order mark, or the reason that it is none."""
        try:
            return self.judge(data.decode("utf-8-sig"), id, None)
        except UnicodeDecodeError:
            return Refusal(INVALID_UTF8)

    def parse_rows(self, columns: Mapping[str, Any]) -> list[Document | Refusal]:
        """Return the document, or the refusal, of each row of a Parquet file; `columns` are pyarrow arrays."""
        texts = _values(columns[self._text_field])
        beside = {name: _values(columns[name]) for name in self._beside if name in columns}
        nothing = [None] * len(texts)
        ids, sources = (beside.get(name, nothing) for name in ("id", "source"))
        return [self.judge(*row) for row in zip(texts, ids, sources, strict=True)]

    def columns(self, path: InputFile, schema: Any) -> list[str]:
        """Return the columns of a Parquet file to read.

        Raises:
            InputError: there is no text column of that name.
        """
        import pyarrow

        names, field = schema.names, self._text_field
        if field not in names:
            raise InputError(f"{path} has no column {field!r}, only {', '.join(names)}; name one as text_field")
        kind = schema.field(field).type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
            raise InputError(f"column {field!r} of {path} holds {kind}, not text; name another as text_field")
        columns = [name for name in dict.fromkeys((field, "id", "source")) if name in names]
        # A nested id or source names no document.
        return [name for name in columns if not pyarrow.types.is_nested(schema.field(name).type)]

    def judge(self, text: Any, id: Any, source: Any) -> Document | Refusal:
        """Return the document of these values, or the reason that it is refused."""
        if not isinstance(text, str):
            return Refusal(INVALID_UTF8 if text == b"" else TEXT_NOT_A_STRING)
        if not text:
            return Refusal(EMPTY_TEXT)
        if len(text) > MAX_LINE_BYTES:
            return Refusal(TOO_LONG_A_LINE)
        return Document(text, as_text(id), as_text(source))

    def _look_again(self, line: bytes) -> Document | Refusal:
        fields = decoded_again(line)
        if isinstance(fields, Refusal):
            return fields
        if self._text_field not in fields:
            return Refusal(NO_TEXT_FIELD)
        text = fields[self._text_field]
        if isinstance(text, str) and has_surrogate(text):
            return Refusal(UNPAIRED_SURROGATE)
        beside = {name: fields.get(name) for name in self._beside}
        return self.judge(text, beside.get("id"), beside.get("source"))


def _values(column: Any) -> list[Any]:
    """Return the values of a column; b"" for bytes that are not valid UTF-8 in a text column."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        singles = (column.slice(row, 1) for row in range(len(column)))
        return [b""] if len(column) == 1 else [value for single in singles for value in _values(single)]


def decoded_again(line: bytes) -> dict[str, Any] | Refusal:
    """Return the object on an irregular line, or the reason that there is none.

    The standard library also accepts NaN and Infinity, which Python's writer emits.
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
    """Return an id or a source as text: other types as JSON, an unpaired surrogate replaced."""
    if value is None or value == b"":
        return None
    if type(value) is str and value.isascii():
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode("utf-8", "replace").decode("utf-8")


# -- files


class WholeText(NamedTuple):
    """The uncompressed bytes of a text file, and its path in the manifest, which is the document's id."""

    data: bytes
    id: str


Block = bytes | dict[str, Any] | WholeText | None
"""Consecutive lines of a file: lines of JSON; rows of Parquet, as pyarrow arrays by column; a text file, which counts
as one line; or None, a line that was skipped for its length."""


def parse_block(block: Block, parser: Any) -> list[Any]:
    """Parse each line with a `DocumentParser` or a `ChatParser`; a newline at the end does not start another line."""
    if block is None:
        return [Refusal(TOO_LONG_A_LINE)]
    if isinstance(block, dict):
        return list(parser.parse_rows(block))
    if isinstance(block, WholeText):
        return [parser.parse_text(*block)]
    lines = block.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return list(map(parser.parse, lines))


class DocumentFile:
    """One input file, read once from start to end; counts and hashes its bytes as they are on disk.

    Args:
        columns: returns the columns of a Parquet file to read, by its path and its schema.
    """

    def __init__(self, path: InputFile, columns: Callable[[InputFile, Any], list[str]]) -> None:
        self.path = path
        self.bytes_read = 0
        self._columns = columns
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the bytes read so far; of the whole file once `blocks` is exhausted."""
        return self._digest.hexdigest()

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """Yield all its lines, in blocks of about `block_bytes` uncompressed bytes (more where one line is longer).

        Every member of a concatenated gzip file and every frame of a zstd file is read.

        Raises:
            CorruptError: a compressed or Parquet file is truncated or damaged.
            InputError: the file cannot be opened, or has no text column.
            OSError: the system fails to read it; the error names it.
        """
        with naming(str(self.path)):
            if self.path.name.endswith(PARQUET_SUFFIX):
                yield from self._row_blocks()
            elif self.path.name.endswith(TEXT_SUFFIXES):
                yield from self._whole_text(block_bytes)
            else:
                yield from self._line_blocks(block_bytes)

    def _whole_text(self, block_bytes: int) -> Iterator[Block]:
        pieces: list[bytes] = []
        read = 0
        with self._open() as raw, _decompressed(self.path, _Counted(raw, self)) as stream:
            while piece := stream.read(block_bytes):
                read += len(piece)
                pieces.append(piece)
                if read > MAX_LINE_BYTES:  # the rest is read for its hash alone
                    pieces.clear()
        yield None if read > MAX_LINE_BYTES else WholeText(b"".join(pieces), recorded_path(self.path))

    def _line_blocks(self, block_bytes: int) -> Iterator[Block]:
        with self._open() as raw, _decompressed(self.path, _Counted(raw, self)) as stream:
            pending: list[bytes] = []
            size = 0
            skipping = False
            for number, chunk in enumerate(iter(partial(stream.read, block_bytes), b"")):
                if number == 0:
                    _refuse_array(self.path, chunk)
                end = chunk.rfind(b"\n") + 1
                if skipping:
                    start = chunk.find(b"\n") + 1
                    if not start:
                        continue
                    skipping, chunk, end = False, chunk[start:], max(0, end - start)
                    yield None
                if end:
                    yield b"".join([*pending, chunk[:end]])
                    pending, size, chunk = [], 0, chunk[end:]
                pending.append(chunk)
                size += len(chunk)
                if size > MAX_LINE_BYTES:
                    pending, size, skipping = [], 0, True
            if skipping:
                yield None
            elif rest := b"".join(pending):
                yield rest

    def _row_blocks(self) -> Iterator[Block]:
        # Imported here: it costs a fifth of a second and 50 MB, which JSON lines do not need.
        import pyarrow
        from pyarrow import parquet

        with self._open() as raw:
            try:
                file = parquet.ParquetFile(raw, pre_buffer=False, buffer_size=BLOCK_BYTES)
                names = self._columns(self.path, file.schema_arrow)
                for batch in file.iter_batches(_rows_a_block(file.metadata, names), columns=names, use_threads=False):
                    self.bytes_read = max(self.bytes_read, raw.tell())
                    yield dict(zip(batch.schema.names, batch.columns, strict=True))
            except (pyarrow.ArrowException, OSError) as error:
                if getattr(error, "errno", None) is not None:  # the system's, and not pyarrow's
                    raise
                raise _damaged(self.path, "Parquet", " ".join(str(error).split())) from error
            # Parquet is not read in order: it is hashed in a separate pass.
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
        """Count and hash `data`, read from the disk."""
        self.bytes_read += len(data)
        self._digest.update(data)


def _refuse_array(path: InputFile, start: bytes) -> None:
    """Raise InputError for a file that begins as one JSON array of objects does, and not as lines with one each."""
    line, _, rest = start.lstrip().partition(b"\n")
    if ARRAY.match(start) and not (line.rstrip().endswith(b"]") and rest.strip()):
        raise InputError(f"{path} is one JSON array, and not an object a line; write a line for each, by jq -c '.[]'")


class _Counted(io.RawIOBase):
    """The file under a decompressor; reports every byte that passes to the DocumentFile."""

    def __init__(self, raw: Any, owner: DocumentFile) -> None:
        self._raw = raw
        self._owner = owner

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size: int = self._raw.readinto(buffer)
        self._owner.count(memoryview(buffer)[:size])
        return size


@contextmanager
def _decompressed(path: InputFile, raw: _Counted) -> Iterator[Any]:
    """Yield the uncompressed bytes of a file. Reading past damage raises CorruptError."""
    if (kind := COMPRESSIONS.get(path.suffix)) is None:
        yield raw
        return
    stream, damage = _decompressor(kind, raw)
    try:
        yield stream
        if not path.stat().st_size:  # it has not even a header, of which igzip says nothing
            raise EOFError
    except EOFError as error:
        raise CorruptError(f"{path} is truncated, its {kind} stream has no end; fetch it again") from error
    except damage as error:
        if getattr(error, "errno", None) is not None:  # the system's
            raise
        raise _damaged(path, kind, error) from error


def _damaged(path: InputFile, kind: str, reason: object) -> CorruptError:
    return CorruptError(f"{path} is damaged ({reason}), not a complete {kind} file; fetch it again")


def _decompressor(kind: str, raw: _Counted) -> tuple[Any, type[Exception] | tuple[type[Exception], ...]]:
    """Return a stream of the uncompressed bytes, and the errors that damage raises."""
    if kind == "gzip":
        return igzip.IGzipFile(fileobj=raw), (igzip.BadGzipFile, IsalError)  # type: ignore[return-value]  # IsalError's stub
    if sys.version_info >= (3, 14):  # no other documents need it
        from compression import zstd
    else:
        from backports import zstd
    return _ZstdFrames(raw, zstd.ZstdDecompressor), zstd.ZstdError


class _ZstdFrames:
    """Frames of zstd one behind the other: the standard library's own file ends silently at a damaged one."""

    def __init__(self, raw: _Counted, decompressor: Callable[[], Any]) -> None:
        self._raw, self._decompressor = raw, decompressor
        self._stream = decompressor()

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes; none at the end.

        Raises:
            EOFError: the last stream has no end.
        """
        output = b""
        while not output:
            data = b""
            if self._stream.eof:
                if not (data := self._stream.unused_data or self._raw.read(BLOCK_BYTES)):
                    break
                self._stream = self._decompressor()
            elif self._stream.needs_input and not (data := self._raw.read(BLOCK_BYTES)):
                raise EOFError
            output = self._stream.decompress(data, size)
        return output


def _rows_a_block(metadata: Any, names: Sequence[str]) -> int:
    """Return how many rows of these columns fit in a block where they are longest: memory must not depend on them."""
    longest = 1.0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        sizes = [
            column.total_uncompressed_size
            for column in map(group.column, range(group.num_columns))
            if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in names)  # columns may be nested
        ]
        longest = max(longest, sum(sizes) / max(1, group.num_rows))
    return max(1, min(ROWS_A_BLOCK, int(BLOCK_BYTES / longest)))


def read_documents(path: Path, text_field: str = "text") -> Iterator[str | Refusal]:
    """Yield the text of each line of one file, or the refusal of the line.

    Raises:
        CorruptError, InputError, OSError: as `DocumentFile.blocks`.
    """
    parser = DocumentParser(text_field)
    for block in DocumentFile(path, parser.columns).blocks():
        for outcome in parse_block(block, parser):
            yield outcome if isinstance(outcome, Refusal) else outcome.text
