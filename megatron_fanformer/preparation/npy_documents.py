"""Documents from headerless `.npy` token files: what `prepare --from-npy` reads."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megatron_fanformer.data.npy_files import NUMPY_MAGIC
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.preparation.encoding import EncodedBlock

BLOCK_TOKENS = 1 << 22
# A file without any end of text was made by another tokenizer, and must not be held in memory as one document.
MAX_DOCUMENT_TOKENS = 1 << 26


class NpyDocuments:
    """One token file, cut into documents after each end-of-text id; what follows the last one is a document too."""

    def __init__(self, path: Path, *, dtype: str, eod_id: int, vocab_size: int) -> None:
        self._path = path
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._eod_id = eod_id
        self._vocab_size = vocab_size

    def blocks(self, output_dtype: str) -> Iterator[EncodedBlock]:
        """Yield its documents in blocks of whole ones; a document counts as a line.

        Raises CorruptError for a size that is not a multiple of the token size, InputError for a file with a
        NumPy header or with an id outside the vocabulary.
        """
        tokens = self._map()
        start = 0
        for at in range(0, len(tokens), BLOCK_TOKENS):
            self._check_ids(tokens[at : at + BLOCK_TOKENS])
            ends = at + 1 + np.flatnonzero(tokens[at : at + BLOCK_TOKENS] == self._eod_id)
            if len(ends) == 0 and at - start > MAX_DOCUMENT_TOKENS:
                raise InputError(
                    f"{self._path} has no end-of-text id {self._eod_id} in more than {MAX_DOCUMENT_TOKENS} tokens;"
                    " set eod_id to the id that ends its documents"
                )
            if len(ends):
                yield _block(tokens[start : ends[-1]], np.diff(ends, prepend=start), output_dtype)
                start = int(ends[-1])
        if start < len(tokens):
            yield _block(tokens[start:], np.array([len(tokens) - start]), output_dtype)

    def _map(self) -> np.ndarray:
        size = self._path.stat().st_size
        if size % self._dtype.itemsize:
            raise CorruptError(
                f"{self._path} holds {size} bytes, not a whole number of {self._dtype.name} tokens;"
                " copy it again, or set npy_dtype to its type"
            )
        with self._path.open("rb") as file:
            if file.read(len(NUMPY_MAGIC)) == NUMPY_MAGIC:
                raise InputError(f"{self._path} has a NumPy header; name headerless token files, as tofile writes them")
        return np.memmap(self._path, self._dtype, mode="r") if size else np.empty(0, self._dtype)

    def _check_ids(self, tokens: np.ndarray) -> None:
        largest = int(tokens.max())
        if largest >= self._vocab_size:
            raise InputError(
                f"{self._path} holds token id {largest}, outside the tokenizer's vocabulary of {self._vocab_size};"
                " name the tokenizer that made the tokens"
            )


def _block(tokens: np.ndarray, lengths: np.ndarray, dtype: str) -> EncodedBlock:
    documents = len(lengths)
    return EncodedBlock(
        lines=documents,
        tokens=tokens.astype(dtype),
        lengths=lengths.astype(np.int32),
        numbers=list(range(documents)),
        ids=[None] * documents,
        sources=[None] * documents,
        text_bytes=0,
        refusals=[],
    )
