"""Reads the sequences of a .bin and .idx pair while a run goes on."""

import functools
import struct
from typing import Any

import numpy as np

from megatron_fanformer.data.id_bounds import refuse_ids_read
from megatron_fanformer.data.live_files import LiveFile, SummedFile
from megatron_fanformer.data.token_files import INDEX_HEADER, bin_path, document_of, idx_path

POINTERS = struct.Struct("<qq")


class PairReader:
    """A pair whose index was checked; takes the place of megatron-core's IndexedDataset in its GPTDataset.

    Args:
        prefix: of the pair.
        dtype: of the tokens.
        sequences: the number of sequences.
        pointer_sums: of the index's pointers, as `TokenIndex` has them.
        vocab_size: ids are below it.

    Raises:
        CorruptError: a file cannot be read.
    """

    def __init__(
        self, prefix: str, dtype: np.dtype[Any], sequences: int, pointer_sums: np.ndarray, vocab_size: int
    ) -> None:
        self._prefix, self._vocab_size = prefix, vocab_size
        self._size, self._dtype = dtype.itemsize, dtype
        self._tokens = LiveFile(bin_path(prefix))
        first_pointer = INDEX_HEADER.size + 4 * sequences  # after the lengths
        self._pointers = SummedFile(idx_path(prefix), pointer_sums, first=first_pointer, size=8 * sequences)
        self._last, self._end = sequences - 1, self._tokens.size

    def place(self, sequence: int) -> tuple[int, int]:
        """The number of a sequence's first token in the .bin file, and its length in tokens.

        Raises:
            CorruptError: the index has become shorter, was overwritten, or cannot be read.
        """
        offset = 8 * int(sequence)
        if sequence < self._last:
            begin, end = POINTERS.unpack(self._pointers.read(16, offset))
        else:
            begin, end = int.from_bytes(self._pointers.read(8, offset), "little"), self._end
        return begin // self._size, (end - begin) // self._size

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """[length] tokens of sequence `idx` from its token `offset` on; None: all that follow.

        Raises:
            CorruptError: a file has become shorter, was overwritten, or cannot be read; an id outside the vocabulary.
        """
        first, whole = self.place(idx)
        count = whole - offset if length is None else int(length)
        content = self._tokens.read(count * self._size, (first + offset) * self._size)
        ids = np.frombuffer(content, self._dtype)
        document = functools.partial(document_of, self._prefix, int(idx))
        refuse_ids_read(ids, self._vocab_size, self._tokens.path, first + offset, document=document)
        return ids
