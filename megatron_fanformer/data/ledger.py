"""`PREFIX.ledger.parquet`: the input file and line of each document of a token file. Write and read ledgers.

A ledger has one row per document, in the token file's order. The statistics of each row group state its first
token, so that only the row groups with the requested tokens are read.

A ledger of chats also has a row for each refused line: it has length 0, and stands where the conversation would.

pyarrow is imported only in functions, since the import takes a fifth of a second.
"""

import bisect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.data.remote_files import RemoteFile, find_file, open_stream
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.stores import is_url

LEDGER_SUFFIX = ".ledger.parquet"
COLUMNS = ("id", "source", "shard", "line", "first_token", "length")
CHAT_COLUMNS = ("learned", "outcome")
WHOLE, CUT = "whole", "cut"  # outcomes of kept conversations; the outcome of a refused one is the reason
GROUP_ROWS = 100_000
CACHED_GROUPS = 8  # a group of 100,000 rows takes about 10 MB


@dataclass(frozen=True)
class LedgerRow:
    """One row: a document, or a line of chats."""

    id: str | None
    source: str | None
    shard: str
    """The input file."""
    line: int
    """Line in that file, from 1."""
    first_token: int
    """The number, in the token file, of the first token of the document, from 0."""
    length: int
    """Tokens, including the end of text; in row folders of chats including the padding."""
    learned: int | None = None
    """Learned tokens of a conversation; None for a document."""
    outcome: str | None = None
    """WHOLE, CUT or the reason of the refusal for a conversation; None for a document."""


def schema(*, is_chats: bool) -> Any:
    """Return the Arrow schema of a ledger."""
    import pyarrow

    text, number, length = pyarrow.string(), pyarrow.int64(), pyarrow.int32()
    fields = list(zip(COLUMNS, (text, text, text, number, number, length), strict=True))
    return pyarrow.schema(fields + (list(zip(CHAT_COLUMNS, (length, text), strict=True)) if is_chats else []))


class LedgerWriter:
    """Writes one row per document, in row groups of a fixed size, so that the bytes do not depend on the batches."""

    def __init__(self, path: Path, *, is_chats: bool) -> None:
        from pyarrow import parquet

        self._schema = schema(is_chats=is_chats)
        repeated = ["source", "shard", *(["outcome"] if is_chats else [])]
        options = {"use_dictionary": repeated, "write_statistics": True, "write_page_checksum": True}
        self._writer = parquet.ParquetWriter(path, self._schema, compression="zstd", **options)
        self._pending: list[Any] = []
        self._pending_rows = 0

    def add(self, rows: Any, shard: str, first_token: int) -> None:
        """Add consecutive documents of the input file `shard`; the first document begins at token `first_token`.

        `rows` is an Arrow record batch with columns id, source, line and length; for chats also learned and outcome.
        """
        import pyarrow

        lengths = rows.column("length").to_numpy()
        starts = first_token + np.cumsum(lengths, dtype=np.int64) - lengths
        columns = {"shard": pyarrow.repeat(shard, len(lengths)), "first_token": pyarrow.array(starts)}
        columns |= {name: rows.column(name) for name in self._schema.names if name not in columns}
        self._pending.append(pyarrow.record_batch([columns[name] for name in self._schema.names], schema=self._schema))
        self._pending_rows += len(lengths)
        if self._pending_rows >= GROUP_ROWS:
            self._write_groups(is_last=False)

    def finish(self) -> None:
        """Write the pending rows and the end of the file."""
        self._write_groups(is_last=True)
        self._writer.close()

    def abandon(self) -> None:
        """Close the file without the pending rows, after a failure."""
        import pyarrow

        with suppress(pyarrow.ArrowException, OSError):  # closing fails if a write has failed
            self._writer.close()

    def _write_groups(self, *, is_last: bool) -> None:
        """Write pending rows in full row groups; with `is_last`, write the remaining rows as a smaller group, too."""
        import pyarrow

        table = pyarrow.Table.from_batches(self._pending, self._schema).combine_chunks()
        end = table.num_rows if is_last else table.num_rows // GROUP_ROWS * GROUP_ROWS
        for start in range(0, end, GROUP_ROWS):
            self._writer.write_table(table.slice(start, min(GROUP_ROWS, end - start)), GROUP_ROWS)
        self._pending = table.slice(end).to_batches()
        self._pending_rows = table.num_rows - end


def open_ledger(prefix: str) -> "Ledger | None":
    """Open the ledger of a prefix, which may be a URL; return None if there is none."""
    path = prefix + LEDGER_SUFFIX
    if is_url(path):
        file = find_file(path)
        return None if file is None else Ledger(file)
    return Ledger(Path(path)) if Path(path).exists() else None


class Ledger:
    """An open ledger. Raises CorruptError if the file is not a ledger, or does not cover the requested tokens."""

    def __init__(self, file: Path | RemoteFile) -> None:
        from pyarrow import parquet

        self.path = file.path if isinstance(file, RemoteFile) else file
        with _reporting_damage(self.path):
            source = open_stream(file) if isinstance(file, RemoteFile) else regular_file(file)
            self._file: Any = parquet.ParquetFile(source, page_checksum_verification=True)
            metadata, names = self._file.metadata, self._file.schema_arrow.names
            if missing := [name for name in COLUMNS if name not in names]:
                raise CorruptError(f"{self.path} has no column {', '.join(missing)}, it is not a ledger; prepare again")
            self.rows: int = metadata.num_rows
            self._columns = [name for name in (*COLUMNS, *CHAT_COLUMNS) if name in names]
            self._groups = [group for group in range(metadata.num_row_groups) if metadata.row_group(group).num_rows]
            chunks = [metadata.row_group(group).column(names.index("first_token")) for group in self._groups]
            self._starts = [int(chunk.statistics.min) for chunk in chunks]  # the first token of each group
        self._read_cached = lru_cache(CACHED_GROUPS)(self._read_group)

    def documents(self, first_token: int, length: int) -> list[LedgerRow]:
        """Return the documents that contain any of `length` tokens from `first_token` on, in order."""
        end = first_token + length
        place = max(0, bisect.bisect_right(self._starts, first_token) - 1)  # the group with `first_token`
        groups = self._groups[place : bisect.bisect_left(self._starts, end)]
        rows = [row for group in groups for row in self._rows_in_group(group, first_token, end)]
        covered = sum(min(end, row.first_token + row.length) - max(first_token, row.first_token) for row in rows)
        if covered != length:
            raise CorruptError(
                f"{self.path} covers {covered} of the {length} tokens from {first_token} on,"
                " it does not belong to these token files; prepare again"
            )
        return rows

    def _read_group(self, group: int) -> tuple[np.ndarray, np.ndarray, Any]:
        """Return the tokens at which a row group's rows begin and end, [rows] int64 each, and the rows as a table."""
        with _reporting_damage(self.path):
            table = self._file.read_row_group(group, columns=self._columns)
            begins = table["first_token"].to_numpy()
            return begins, begins + table["length"].to_numpy(), table

    def _rows_in_group(self, group: int, begin: int, end: int) -> Iterator[LedgerRow]:
        """Yield the rows of a row group that contain any of the tokens from `begin` up to `end`."""
        begins, ends, table = self._read_cached(group)
        first, last = int(np.searchsorted(ends, begin, "right")), int(np.searchsorted(begins, end, "left"))
        # If no token is requested, `last` may be less than `first`.
        rows = (LedgerRow(**row) for row in table.slice(first, max(0, last - first)).to_pylist())
        return (row for row in rows if row.length)  # a refused line has no tokens


@contextmanager
def _reporting_damage(path: Path | str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, AttributeError) as error:  # AttributeError: no statistics
        reason = " ".join(str(error).split())
        raise CorruptError(f"{path} cannot be read as a ledger ({reason}); prepare again") from error
