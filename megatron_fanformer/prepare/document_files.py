"""Document files, read once from start to end in blocks: JSON lines and text, plain or compressed, and Parquet.

A block can be parsed on its own, by another thread. Memory is bounded by the block size, or by the longest
line that is accepted, whatever the file contains and however well it is compressed.
"""

import bz2
import hashlib
import io
import lzma
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from isal import igzip
from isal.igzip_lib import IsalError

from megatron_fanformer.durable_files import naming, regular_file
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.prepare.documents import (
    MAX_LINE_BYTES,
    TOO_LONG_A_LINE,
    ChatParser,
    DocumentParser,
    Refusal,
    text_columns,
)
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
# A page of Parquet repeats a value of its column's dictionary in a few bits: a file of 1.8 kB can hold 120 GB of text.
# A sound writer ends a dictionary at 1 MB, but looks only after some thousand rows, which may be long documents.
LARGEST_DICTIONARY_BYTES = 48 << 20
REPEATED_BYTES_A_BLOCK = 128 << 20
DICTIONARY_PAGE = 2
ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*\{")
LARGEST_XZ_BYTES = 128 << 20  # of its decompressor's memory; xz -9 takes 65 MiB
PAGE_HEADER_BYTES = 32  # the fields that are read take 18 at most


class WholeText(NamedTuple):
    """A text file's bytes, uncompressed, and its path in the manifest, which is the document's id."""

    data: bytes
    id: str


Block = bytes | dict[str, Any] | WholeText | None
"""Some consecutive lines of a file: whole lines of JSON; rows of Parquet, as pyarrow arrays by column; a text file, as
one line; or None, for one that was skipped for its length."""


Parser = DocumentParser | ChatParser


def parse_block(block: Block, parser: Parser) -> list[Any]:
    """Parse each line; a newline at the end does not start another line."""
    if block is None:
        return [Refusal(TOO_LONG_A_LINE)]
    if isinstance(block, dict):
        return list(parser.parse_rows(block))
    if isinstance(block, WholeText):
        assert isinstance(parser, DocumentParser)  # no text file is an input of conversations
        return [parser.parse_text(*block)]
    lines = block.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return list(map(parser.parse, lines))


class DocumentFile:
    """One input file, read once from start to end; counts and hashes its bytes as they are on disk.

    Args:
        columns: which columns of a Parquet file to read, by its path and its schema.
    """

    def __init__(self, path: InputFile, columns: Callable[[InputFile, Any], list[str]] = text_columns) -> None:
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

        Every member of a concatenated gzip file and every frame of a zstd file is read. Raises CorruptError
        for a compressed or Parquet file that is truncated or damaged, InputError for one that cannot be opened
        or has no text column, OSError, which names it, where the system fails to read it.
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
                rows = _rows_a_block(self.path, raw, file.metadata, names)
                for batch in file.iter_batches(rows, columns=names, use_threads=False):
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
    if kind == "bzip2":
        return _Streams(raw, bz2.BZ2Decompressor), OSError
    if kind == "xz":
        return _Streams(raw, partial(lzma.LZMADecompressor, lzma.FORMAT_XZ, LARGEST_XZ_BYTES)), lzma.LZMAError
    if sys.version_info >= (3, 14):  # no other documents need it
        from compression import zstd
    else:
        from backports import zstd
    return _Streams(raw, zstd.ZstdDecompressor), zstd.ZstdError


class _Streams:
    """Compressed streams one behind the other. The standard library's files end without a word at a damaged one, and
    that of xz takes any memory.
    """

    def __init__(self, raw: _Counted, decompressor: Callable[[], Any]) -> None:
        self._raw, self._decompressor = raw, decompressor
        self._stream = decompressor()

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes; none at the end. Raises EOFError inside a stream without an end."""
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


def _rows_a_block(path: InputFile, raw: Any, metadata: Any, names: Sequence[str]) -> int:
    """Return how many rows of these columns fit in a block where they are longest: memory must not depend on them.

    Raises InputError for a dictionary that no sound writer makes.
    """
    longest, dictionary_bytes = 1.0, 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        columns = [
            column
            for column in map(group.column, range(group.num_columns))
            if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in names)  # which may be nested
        ]
        longest = max(longest, sum(column.total_uncompressed_size for column in columns) / max(1, group.num_rows))
        dictionary_bytes = max([dictionary_bytes, *(_dictionary_bytes(raw, column) for column in columns)])
    if dictionary_bytes > LARGEST_DICTIONARY_BYTES:
        raise InputError(
            f"{path} has a dictionary of {dictionary_bytes} bytes, more than {LARGEST_DICTIONARY_BYTES}, of which a few"
            " bytes can repeat any value any number of times; write it again without dictionaries"
            " (use_dictionary=False)"
        )
    repeated = REPEATED_BYTES_A_BLOCK // max(1, dictionary_bytes)
    return max(1, min(ROWS_A_BLOCK, int(BLOCK_BYTES / longest), repeated))


def _dictionary_bytes(raw: Any, column: Any) -> int:
    starts = (column.dictionary_page_offset, column.data_page_offset)
    raw.seek(min(start for start in starts if start is not None))
    kind, size = _page_header(raw.read(PAGE_HEADER_BYTES))
    return size if kind == DICTIONARY_PAGE else 0


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
    return (values[0], values[1]) if len(values) == 2 else (0, 0)  # whatever it is, reading it will show


def read_documents(path: Path, text_field: str = "text") -> Iterator[str | Refusal]:
    """Yield the documents of one file in order: the text of each line, or why the line is refused.

    Raises like `DocumentFile.blocks`.
    """
    parser = DocumentParser(text_field)
    for block in DocumentFile(path, partial(text_columns, text_field=text_field)).blocks():
        yield from (one if isinstance(one, Refusal) else one.text for one in parse_block(block, parser))
