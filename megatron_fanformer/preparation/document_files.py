"""Document files, read once from start to end in blocks: JSON lines, plain or compressed, and Parquet.

A block can be parsed on its own, by another thread. Memory is bounded by the block size, or by the longest
line that is accepted, whatever the file contains and however well it is compressed.
"""

import hashlib
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from isal import igzip
from isal.igzip_lib import IsalError

from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.preparation.documents import (
    INVALID_UTF8,
    TEXT_NOT_A_STRING,
    TOO_LONG_A_LINE,
    DocumentParser,
    DocumentRules,
    Refusal,
)
from megatron_fanformer.preparation.inputs import PARQUET_SUFFIX

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BLOCK_BYTES = 1 << 20
# A longer line is refused. The text of one line may take four times its bytes, and its ids as much again.
MAX_LINE_BYTES = 128 << 20
ROWS_A_BLOCK = 256
# A page of Parquet repeats a value of its column's dictionary in a few bits: a file of 1.8 kB can hold 120 GB of text.
# A sound writer ends a dictionary at 1 MB, but looks only after some thousand rows, which may be long documents.
LARGEST_DICTIONARY_BYTES = 48 << 20
REPEATED_BYTES_A_BLOCK = 128 << 20
DICTIONARY_PAGE = 2
PAGE_HEADER_BYTES = 32  # the fields that are read take 18 at most


@dataclass
class Parsed:
    """The documents and refusals of the lines of one block."""

    lines: int
    documents: list[Any] = field(default_factory=list)
    """What the parser found on them: Document, or Chat."""
    numbers: list[int] = field(default_factory=list)
    """Each document's line in the block, from 0."""
    refusals: list[tuple[int, str]] = field(default_factory=list)
    """Line in the block, from 0, and reason."""

    def note(self, number: int, outcome: Any) -> None:
        """Record the outcome of one line."""
        if isinstance(outcome, Refusal):
            self.refusals.append((number, outcome.reason))
        else:
            self.documents.append(outcome)
            self.numbers.append(number)


class LineParser(Protocol):
    """Parses a line: DocumentParser, or ChatParser."""

    def parse(self, line: bytes) -> Any:
        """Return what is on the line, or a Refusal."""


class Block(Protocol):
    """Some consecutive lines of a file."""

    def parse(self, parser: Any) -> Parsed:
        """Parse its lines, by the parser of what the file holds."""


@dataclass(frozen=True)
class LineBlock:
    """Whole lines of JSON."""

    data: bytes

    def parse(self, parser: LineParser) -> Parsed:
        """Parse each line; a newline at the end does not start another line."""
        lines = self.data.split(b"\n")
        if not lines[-1]:
            lines.pop()
        parsed = Parsed(len(lines))
        for number, line in enumerate(lines):
            parsed.note(number, parser.parse(line))
        return parsed


@dataclass(frozen=True)
class OverlongLine:
    """A line that was skipped for its length."""

    def parse(self, parser: LineParser) -> Parsed:
        """Refuse it."""
        return Parsed(1, refusals=[(0, TOO_LONG_A_LINE)])


@dataclass(frozen=True)
class RowBlock:
    """Rows of a Parquet file: those of the text, id and source columns that exist."""

    columns: dict[str, Any]  # pyarrow arrays, by field

    def parse(self, parser: DocumentParser) -> Parsed:
        """Parse each row as a document."""
        texts = _values(self.columns[parser.text_field])
        nothing = [None] * len(texts)
        ids, sources = (_values(self.columns[name]) if name in self.columns else nothing for name in ("id", "source"))
        parsed = Parsed(len(texts))
        for number, (text, id, source) in enumerate(zip(texts, ids, sources, strict=True)):
            if isinstance(text, str) and len(text) > MAX_LINE_BYTES:
                parsed.note(number, Refusal(TOO_LONG_A_LINE))
            else:
                parsed.note(number, parser.judge(text, id, source) if isinstance(text, str) else _not_text(text))
        return parsed


def _values(column: Any) -> list[Any]:
    """Return the values of a column; b"" for bytes that are not valid UTF-8 in a text column."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [value for single in range(len(column)) for value in _value(column.slice(single, 1))]


def _value(single: Any) -> list[Any]:
    try:
        return list(single.to_pylist())
    except UnicodeDecodeError:
        return [b""]


def _not_text(value: Any) -> Refusal:
    return Refusal(INVALID_UTF8 if value == b"" else TEXT_NOT_A_STRING)


class Rows(Protocol):
    """The rows of a Parquet file: TextRows, or ChatRows."""

    def columns(self, path: Path, schema: Any) -> list[str]:
        """Return the names of the columns. Raises InputError if those that are needed are not there."""

    def block(self, columns: Mapping[str, Any]) -> Block:
        """Return the block of some rows, by columns."""


@dataclass(frozen=True)
class TextRows:
    """Documents: a column of texts, and those of ids and sources."""

    text_field: str = "text"

    def columns(self, path: Path, schema: Any) -> list[str]:
        """See Rows."""
        return _columns(path, schema, self.text_field)

    def block(self, columns: Mapping[str, Any]) -> RowBlock:
        """See Rows."""
        return RowBlock(dict(columns))


class DocumentFile:
    """One input file, read once from start to end; counts and hashes its bytes as they are on disk."""

    def __init__(self, path: Path, rows: Rows | None = None) -> None:
        """Args: rows: what is read of a Parquet file; None: the columns text, id and source."""
        self.path = path
        self.bytes_read = 0
        self._rows = rows or TextRows()
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the bytes read so far; of the whole file once `blocks` is exhausted."""
        return self._digest.hexdigest()

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """Return all its lines, in blocks of about `block_bytes` uncompressed bytes (more where one line is longer).

        Every member of a concatenated gzip file and every frame of a zstd file is read. Raises CorruptError
        for a compressed or Parquet file that is truncated or damaged, InputError for one that cannot be opened
        or has no text column.
        """
        if self.path.name.endswith(PARQUET_SUFFIX):
            return self._row_blocks()
        return self._line_blocks(block_bytes)

    def _line_blocks(self, block_bytes: int) -> Iterator[Block]:
        with self._open() as raw, _decompressed(self.path, _Counted(raw, self)) as stream:
            pending: list[bytes] = []
            size = 0
            skipping = False
            while chunk := stream.read(block_bytes):
                end = chunk.rfind(b"\n") + 1
                if skipping:
                    start = chunk.find(b"\n") + 1
                    if not start:
                        continue
                    skipping, chunk, end = False, chunk[start:], max(0, end - start)
                    yield OverlongLine()
                if end:
                    yield LineBlock(b"".join([*pending, chunk[:end]]))
                    pending, size, chunk = [], 0, chunk[end:]
                pending.append(chunk)
                size += len(chunk)
                if size > MAX_LINE_BYTES:
                    pending, size, skipping = [], 0, True
            if skipping:
                yield OverlongLine()
            elif rest := b"".join(pending):
                yield LineBlock(rest)

    def _row_blocks(self) -> Iterator[Block]:
        # Imported here: it costs a fifth of a second and 50 MB, which JSON lines do not need.
        import pyarrow
        from pyarrow import parquet

        with self._open() as raw, _naming_parquet(self.path, pyarrow.ArrowException):
            file = parquet.ParquetFile(raw, pre_buffer=False, buffer_size=BLOCK_BYTES)
            names = self._rows.columns(self.path, file.schema_arrow)
            rows = _rows_a_block(file.metadata, names, _largest_dictionary(self.path, raw, file.metadata, names))
            for batch in file.iter_batches(rows, columns=names, use_threads=False):
                self.bytes_read = max(self.bytes_read, raw.tell())
                yield self._rows.block(dict(zip(batch.schema.names, batch.columns, strict=True)))
            self._hash_all(raw)

    def _hash_all(self, raw: IO[bytes]) -> None:
        """Parquet is not read in order: hash it in a separate pass."""
        self.bytes_read = 0
        raw.seek(0)
        while data := raw.read(BLOCK_BYTES):
            self.count(memoryview(data))

    def _open(self) -> io.FileIO:
        try:
            return regular_file(self.path).open("rb", buffering=0)
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror}") from error

    def count(self, data: memoryview) -> None:
        """Count and hash `data`, read from the disk."""
        self.bytes_read += len(data)
        self._digest.update(data)


class _Counted(io.RawIOBase):
    """The file under a decompressor; reports every byte that passes to the DocumentFile."""

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
def _decompressed(path: Path, raw: io.RawIOBase) -> Iterator[Any]:
    """The uncompressed bytes of a file. Reading past damage raises CorruptError."""
    kind = "gzip" if path.suffix == ".gz" else "zstd"
    try:
        match path.suffix:
            case ".gz":
                yield igzip.IGzipFile(fileobj=raw)
            case ".zst":
                yield zstd.ZstdFile(raw)
            case _:
                yield raw
    except EOFError as error:
        raise CorruptError(f"{path} is truncated, its {kind} stream has no end; fetch it again") from error
    except zstd.ZstdError as error:
        if "memory" in str(error):
            reason = "its zstd window is above 128 MB; compress it again without --long or --ultra"
            raise InputError(f"{path} cannot be read, {reason}") from error
        raise CorruptError(f"{path} is damaged ({error}), not a complete {kind} file; fetch it again") from error
    except (igzip.BadGzipFile, IsalError) as error:  # type: ignore[misc]  # IsalError's stub
        raise CorruptError(f"{path} is damaged ({error}), not a complete {kind} file; fetch it again") from error


@contextmanager
def _naming_parquet(path: Path, kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except (kind, OSError) as error:
        reason = " ".join(str(error).split())
        raise CorruptError(f"{path} is damaged ({reason}), not a complete Parquet file; fetch it again") from error


def _columns(path: Path, schema: Any, text_field: str) -> list[str]:
    """Return the columns to read. Raises InputError if there is no text column of that name."""
    import pyarrow

    names: Sequence[str] = schema.names
    if text_field not in names:
        raise InputError(f"{path} has no column {text_field!r}, only {', '.join(names)}; name one as text_field")
    kind = schema.field(text_field).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise InputError(f"column {text_field!r} of {path} holds {kind}, not text; name another as text_field")
    found = [name for name in dict.fromkeys((text_field, "id", "source")) if name in names]
    return [name for name in found if not pyarrow.types.is_nested(schema.field(name).type)]  # neither names a document


def _largest_dictionary(path: Path, raw: io.FileIO, metadata: Any, names: Sequence[str]) -> int:
    """Bytes of the largest dictionary of these columns. Raises InputError for one that no sound writer makes."""
    largest = 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if _is_of(column, names):
                starts = (column.dictionary_page_offset, column.data_page_offset)
                raw.seek(min(start for start in starts if start is not None))
                kind, size = _page_header(raw.read(PAGE_HEADER_BYTES))
                largest = max(largest, size if kind == DICTIONARY_PAGE else 0)
    if largest > LARGEST_DICTIONARY_BYTES:
        raise InputError(
            f"{path} has a dictionary of {largest} bytes, more than {LARGEST_DICTIONARY_BYTES}, of which a few bytes"
            " can repeat any value any number of times; write it again without dictionaries (use_dictionary=False)"
        )
    return largest


def _is_of(column: Any, names: Sequence[str]) -> bool:
    """Return whether a column of values belongs to one of these columns of the schema, which may be nested."""
    return any(column.path_in_schema == name or column.path_in_schema.startswith(f"{name}.") for name in names)


def _page_header(data: bytes) -> tuple[int, int]:
    """Return the kind of a Parquet page, and its uncompressed bytes: the first two fields of its header.

    Source: parquet.thrift, `PageHeader`, in Thrift's compact protocol: a byte 0x15 (the next field, an integer) before
    each, then the integer in groups of seven bits, its sign the lowest.
    """
    values: list[int] = []
    at = 0
    while len(values) < 2 and data[at : at + 1] == b"\x15":
        number = shift = 0
        at += 1
        while at < len(data) and data[at] & 0x80:
            number, shift, at = number | (data[at] & 0x7F) << shift, shift + 7, at + 1
        number |= (data[at] if at < len(data) else 0) << shift
        values.append((number >> 1) ^ -(number & 1))
        at += 1
    return (values[0], values[1]) if len(values) == 2 else (0, 0)  # whatever it is, reading it will tell


def _rows_a_block(metadata: Any, names: Sequence[str], dictionary_bytes: int) -> int:
    """Return how many rows fit in a block where they are longest: memory must not depend on their number."""
    longest = 1.0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = [group.column(number) for number in range(group.num_columns)]
        size = sum(column.total_uncompressed_size for column in columns if _is_of(column, names))
        longest = max(longest, size / max(1, group.num_rows))
    repeated = REPEATED_BYTES_A_BLOCK // max(1, dictionary_bytes)
    return max(1, min(ROWS_A_BLOCK, int(BLOCK_BYTES / longest), repeated))


def read_documents(path: Path, text_field: str = "text") -> Iterator[str | Refusal]:
    """Yield the documents of one file in order: the text of each line, or why the line is refused.

    Raises what `DocumentFile.blocks` raises.
    """
    parser = DocumentParser(DocumentRules(text_field=text_field))
    for block in DocumentFile(path, TextRows(text_field)).blocks():
        parsed = block.parse(parser)
        outcomes: dict[int, str | Refusal] = {number: Refusal(reason) for number, reason in parsed.refusals}
        outcomes.update(zip(parsed.numbers, (document.text for document in parsed.documents), strict=True))
        yield from (outcomes[number] for number in range(parsed.lines))
