"""Reads the sequences of a .bin and .idx pair while a run goes on.

megatron-core maps both files into memory. A process does not survive the use of a mapped page that its file has lost,
and nothing is printed: here files are read, and one that was cut off is an error with a name.
"""

import os
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.data.token_files import INDEX_HEADER, bin_path, idx_path
from megatron_fanformer.errors import CorruptError

POINTERS = struct.Struct("<qq")


class PairReader:
    """A pair whose index was checked; takes the place of megatron-core's IndexedDataset in its GPTDataset.

    Args:
        prefix: of the pair.
        dtype: of the tokens.
        sequences: the number of sequences.

    Raises:
        CorruptError: a file cannot be read.
    """

    def __init__(self, prefix: str, dtype: np.dtype[Any], sequences: int) -> None:
        self._size, self._dtype = dtype.itemsize, dtype
        self._tokens, self._index = _File(bin_path(prefix)), _File(idx_path(prefix))
        self._first_pointer = INDEX_HEADER.size + 4 * sequences  # after the lengths
        self._last, self._end = sequences - 1, self._tokens.size

    def place(self, sequence: int) -> tuple[int, int]:
        """The number of a sequence's first token in the .bin file, and its length in tokens.

        Raises:
            CorruptError: the index has become shorter, or cannot be read.
        """
        offset = self._first_pointer + 8 * int(sequence)
        if sequence < self._last:
            begin, end = POINTERS.unpack(self._index.read(16, offset))
        else:
            begin, end = int.from_bytes(self._index.read(8, offset), "little"), self._end
        return begin // self._size, (end - begin) // self._size

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """[length] tokens of sequence `idx` from its token `offset` on; None: all that follow.

        Raises:
            CorruptError: a file has become shorter, or cannot be read.
        """
        first, whole = self.place(idx)
        count = whole - offset if length is None else int(length)
        return np.frombuffer(self._tokens.read(count * self._size, (first + offset) * self._size), self._dtype)


class _File:
    """A file that is kept open, also in the loader processes that a rank forks: they share no position in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
            self.size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise self._unreadable(error) from error
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, count: int, offset: int) -> bytes:
        try:
            content = os.pread(self._descriptor, count, offset)
            while len(content) < count:  # the end of the file, or of what a file system returns at a time
                if not (more := os.pread(self._descriptor, count - len(content), offset + len(content))):
                    raise CorruptError(f"{self._path} has become shorter since the run began; copy it again and resume")
                content += more
        except OSError as error:
            raise self._unreadable(error) from error
        return content

    def _unreadable(self, error: OSError) -> CorruptError:
        return CorruptError(f"{self._path} cannot be read ({error.strerror}); copy it again and resume")
