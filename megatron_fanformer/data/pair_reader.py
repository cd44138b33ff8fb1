"""Reads the sequences of a .bin and .idx pair while a run goes on.

megatron-core maps both files into memory. A process does not survive the use of a mapped page that its file has lost,
and nothing is printed: here files are read, and one that was cut off is an error with a name. For samples of 2,049
tokens that takes as long as copying them out of a map (tools/bench_pairs.py).
"""

import os
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.data.token_files import INDEX_HEADER, bin_path, idx_path
from megatron_fanformer.errors import CorruptError

LENGTH, POINTER = struct.Struct("<i"), struct.Struct("<q")


class PairReader:
    """A pair whose index was checked; takes the place of megatron-core's IndexedDataset in its GPTDataset.

    Args:
        prefix: of the pair.
        dtype: of the tokens.
        sequences: the number of sequences.

    Raises:
        CorruptError: a file cannot be opened.
    """

    def __init__(self, prefix: str, dtype: np.dtype[Any], sequences: int) -> None:
        self._dtype, self._sequences = dtype, sequences
        self._tokens, self._index = _File(bin_path(prefix)), _File(idx_path(prefix))

    def place(self, sequence: int) -> tuple[int, int]:
        """The number of a sequence's first token in the .bin file, and its length in tokens.

        Raises:
            CorruptError: the index has become shorter, or cannot be read.
        """
        lengths = INDEX_HEADER.size
        pointers = lengths + self._sequences * LENGTH.size
        (length,) = LENGTH.unpack(self._index.read(LENGTH.size, lengths + int(sequence) * LENGTH.size))
        (pointer,) = POINTER.unpack(self._index.read(POINTER.size, pointers + int(sequence) * POINTER.size))
        return pointer // self._dtype.itemsize, length

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """[length] tokens of sequence `idx` from its token `offset` on; None: all that follow.

        Raises:
            CorruptError: a file has become shorter, or cannot be read.
        """
        first, whole = self.place(idx)
        count, size = whole - offset if length is None else int(length), self._dtype.itemsize
        return np.frombuffer(self._tokens.read(count * size, (first + offset) * size), dtype=self._dtype)


class _File:
    """A file that is kept open, also in the loader processes that a rank forks: they share no position in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
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
