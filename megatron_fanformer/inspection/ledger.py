"""`PREFIX.ledger.parquet`: from which line of which file each document of a token file comes.

One row a document, in the token file's order, in row groups whose statistics tell which tokens they speak of: a
document is found by its tokens without reading more than a row group.
"""

import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_fanformer.errors import CorruptError

COLUMNS = ("id", "source", "shard", "line", "first_token", "length")
CACHED_GROUPS = 8  # a group of 100,000 rows takes some ten megabytes


@dataclass(frozen=True)
class Document:
    """One row."""

    id: str | None
    source: str | None
    shard: str
    """The input file."""
    line: int
    """In that file, from 1."""
    first_token: int
    """Its position in the token file, in tokens."""
    length: int
    """Tokens, the end of text included."""


def ledger_path(prefix: str) -> Path:
    """Where the ledger of a prefix stands."""
    return Path(prefix + ".ledger.parquet")


class Ledger:
    """An opened ledger.

    Raises:
        CorruptError: it cannot be read as one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _damage_told(path):
            self._file = pq.ParquetFile(path)
            missing = [name for name in COLUMNS if name not in self._file.schema_arrow.names]
            if missing:
                raise CorruptError(f"{path} has no column {', '.join(missing)}: it is no ledger; prepare again")
            self.rows: int = self._file.metadata.num_rows
            metadata = self._file.metadata
            self._groups = [group for group in range(metadata.num_row_groups) if metadata.row_group(group).num_rows]
            self._starts = [self._first_token_of(group) for group in self._groups]
        self._group = lru_cache(CACHED_GROUPS)(self._read_group)

    def documents(self, first_token: int, length: int) -> list[Document]:
        """The documents that have one of these tokens, in order.

        Raises:
            CorruptError: the ledger leaves out some of them.
        """
        end = first_token + length
        found: list[Document] = []
        place = max(0, bisect.bisect_right(self._starts, first_token) - 1)
        while place < len(self._groups) and self._starts[place] < end:
            found += self._in_group(self._groups[place], first_token, end)
            place += 1
        covered = sum(min(end, d.first_token + d.length) - max(first_token, d.first_token) for d in found)
        if covered != length:
            raise CorruptError(
                f"{self.path} speaks of {covered} of the {length} tokens from {first_token} on:"
                " it is not of these token files; prepare again"
            )
        return found

    def spans(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """`first_token` and `length` of all rows, block by block."""
        with _damage_told(self.path):
            for block in self._file.iter_batches(columns=["first_token", "length"]):
                yield tuple(block.column(name).to_numpy(zero_copy_only=False) for name in ("first_token", "length"))

    def _first_token_of(self, group: int) -> int:
        position = self._file.schema_arrow.names.index("first_token")
        statistics = self._file.metadata.row_group(group).column(position).statistics
        if statistics is None or not statistics.has_min_max:
            raise CorruptError(f"{self.path} has no statistics of first_token to find documents by: prepare again")
        return int(statistics.min)

    def _read_group(self, group: int) -> tuple[np.ndarray, np.ndarray, pa.Table]:
        with _damage_told(self.path):
            table = self._file.read_row_group(group, columns=list(COLUMNS))
            first = table["first_token"].to_numpy()
            return first, first + table["length"].to_numpy(), table

    def _in_group(self, group: int, begin: int, end: int) -> Iterator[Document]:
        first, last, table = self._group(group)
        low, high = int(np.searchsorted(last, begin, "right")), int(np.searchsorted(first, end, "left"))
        return (Document(**row) for row in table.slice(low, max(0, high - low)).to_pylist())


@contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise CorruptError(f"{path} cannot be read as a ledger ({reason}): prepare again") from error
