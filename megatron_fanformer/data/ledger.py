"""`PREFIX.ledger.parquet`: which line of which file each document of a token file comes from; written and read.

One row per document, in the token file's order, in row groups whose statistics say which tokens they cover: a
document is found by its tokens without reading more than a row group.

A ledger of chats says of every line what became of it: a refused one has a row too, of length 0, at the token where it
would stand.

pyarrow is imported where it is used: it takes a fifth of a second, which not every command needs to spend.
"""

import bisect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.data.remote_files import RemoteFile, find, open_stream
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.stores import is_url

LEDGER_SUFFIX = ".ledger.parquet"
COLUMNS = ("id", "source", "shard", "line", "first_token", "length")
CHAT_COLUMNS = ("learned", "outcome")
# Outcomes of a conversation that was kept; of another, the reason.
WHOLE, CUT = "whole", "cut"
GROUP_ROWS = 100_000
CACHED_GROUPS = 8  # a group of 100,000 rows takes about 10 MB


@dataclass(frozen=True)
class LedgerRow:
    """One row."""

    id: str | None
    source: str | None
    shard: str
    """The input file."""
    line: int
    """Line in that file, from 1."""
    first_token: int
    """Position of its first token in the token file, in tokens."""
    length: int
    """Tokens, including the end of text, and for chats in rows the padding."""
    learned: int | None = None
    """Tokens that are learned, for a conversation."""
    outcome: str | None = None
    """WHOLE or CUT for a conversation; for one that was refused, the reason."""


def schema(*, is_chats: bool) -> Any:
    """Return the columns with their types."""
    import pyarrow

    text, number, length = pyarrow.string(), pyarrow.int64(), pyarrow.int32()
    fields = list(zip(COLUMNS, (text, text, text, number, number, length), strict=True))
    return pyarrow.schema(fields + (list(zip(CHAT_COLUMNS, (length, text), strict=True)) if is_chats else []))


class LedgerWriter:
    """Writes one row per document, in groups of a fixed size, so that the file's bytes are fixed too."""

    def __init__(self, path: Path, *, is_chats: bool) -> None:
        from pyarrow import parquet

        self._schema = schema(is_chats=is_chats)
        repeated = ["source", "shard", *(["outcome"] if is_chats else [])]
        self._writer = parquet.ParquetWriter(
            path,
            self._schema,
            compression="zstd",
            use_dictionary=repeated,
            write_statistics=True,
            write_page_checksum=True,
        )
        self._pending: list[Any] = []
        self._pending_rows = 0

    def add(self, rows: Any, shard: str, first_token: int) -> None:
        """Add documents of one input file, whose first begins at token `first_token`.

        `rows` are an Arrow record batch with columns id, source, line and length; of chats also learned and outcome.
        """
        import pyarrow

        lengths = rows.column("length").to_numpy()
        starts = first_token + np.cumsum(lengths, dtype=np.int64) - lengths
        columns = {"shard": pyarrow.repeat(shard, len(lengths)), "first_token": pyarrow.array(starts)}
        columns |= {name: rows.column(name) for name in self._schema.names if name not in columns}
        batch = [columns[name] for name in self._schema.names]
        self._pending.append(pyarrow.record_batch(batch, schema=self._schema))
        self._pending_rows += len(lengths)
        if self._pending_rows >= GROUP_ROWS:
            self._write_groups(rest=False)

    def finish(self) -> None:
        """Write the pending rows and the end of the file."""
        self._write_groups(rest=True)
        self._writer.close()

    def abandon(self) -> None:
        """Close the writer of a ledger that will not be finished."""
        import pyarrow

        with suppress(pyarrow.ArrowException, OSError):  # of a write that failed before
            self._writer.close()

    def _write_groups(self, *, rest: bool) -> None:
        import pyarrow

        table = pyarrow.Table.from_batches(self._pending, self._schema).combine_chunks()
        whole = table.num_rows if rest else table.num_rows // GROUP_ROWS * GROUP_ROWS
        for start in range(0, whole, GROUP_ROWS):
            self._writer.write_table(table.slice(start, min(GROUP_ROWS, whole - start)), GROUP_ROWS)
        self._pending = table.slice(whole).to_batches()
        self._pending_rows = table.num_rows - whole


def open_ledger(prefix: str) -> "Ledger | None":
    """Return the ledger of a prefix, which may be a URL; None where there is none."""
    path = prefix + LEDGER_SUFFIX
    if is_url(path):
        file = find(path)
        return None if file is None else Ledger(file)
    return Ledger(Path(path)) if Path(path).exists() else None


class Ledger:
    """An opened ledger. Raises CorruptError where it cannot be read as one, or does not cover the tokens."""

    def __init__(self, path: Path | RemoteFile) -> None:
        from pyarrow import parquet

        self.path = path.path if isinstance(path, RemoteFile) else path
        with _damage_reported(self.path):
            source = open_stream(path) if isinstance(path, RemoteFile) else regular_file(path)
            self._file: Any = parquet.ParquetFile(source, page_checksum_verification=True)
            metadata, names = self._file.metadata, self._file.schema_arrow.names
            if missing := [name for name in COLUMNS if name not in names]:
                raise CorruptError(f"{self.path} has no column {', '.join(missing)}, it is not a ledger; prepare again")
            self.rows: int = metadata.num_rows
            self._columns = [name for name in (*COLUMNS, *CHAT_COLUMNS) if name in names]
            self._groups = [group for group in range(metadata.num_row_groups) if metadata.row_group(group).num_rows]
            columns = [metadata.row_group(group).column(names.index("first_token")) for group in self._groups]
            self._starts = [int(column.statistics.min) for column in columns]
        self._group = lru_cache(CACHED_GROUPS)(self._read_group)

    def documents(self, first_token: int, length: int) -> list[LedgerRow]:
        """Return the documents that contain any of these tokens, in order; refused conversations are left out."""
        end = first_token + length
        rows: list[LedgerRow] = []
        place = max(0, bisect.bisect_right(self._starts, first_token) - 1)
        while place < len(self._groups) and self._starts[place] < end:
            rows += self._in_group(self._groups[place], first_token, end)
            place += 1
        covered = sum(min(end, d.first_token + d.length) - max(first_token, d.first_token) for d in rows)
        if covered != length:
            raise CorruptError(
                f"{self.path} covers {covered} of the {length} tokens from {first_token} on,"
                " it does not belong to these token files; prepare again"
            )
        return rows

    def _read_group(self, group: int) -> tuple[np.ndarray, np.ndarray, Any]:
        with _damage_reported(self.path):
            table = self._file.read_row_group(group, columns=self._columns)
            first = table["first_token"].to_numpy()
            return first, first + table["length"].to_numpy(), table

    def _in_group(self, group: int, begin: int, end: int) -> Iterator[LedgerRow]:
        first, last, table = self._group(group)
        low, high = int(np.searchsorted(last, begin, "right")), int(np.searchsorted(first, end, "left"))
        rows = (LedgerRow(**row) for row in table.slice(low, max(0, high - low)).to_pylist())
        return (row for row in rows if row.length)


@contextmanager
def _damage_reported(path: Path | str) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, AttributeError) as error:  # without statistics
        reason = " ".join(str(error).split())
        raise CorruptError(f"{path} cannot be read as a ledger ({reason}); prepare again") from error
