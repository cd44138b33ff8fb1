"""Documents from headerless `.npy` token files: what `prepare --from-npy` reads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.data.npy_files import NUMPY_MAGIC
from megatron_fanformer.durable_files import naming
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.preparation.encoding import EncodedBlock

BLOCK_TOKENS = 1 << 22
# A file without any end of text was made by another tokenizer, and must not be held in memory as one document.
MAX_DOCUMENT_TOKENS = 1 << 26


def npy_blocks(path: Path, *, dtype: str, eod_id: int, vocab_size: int, output_dtype: str) -> Iterator[EncodedBlock]:
    """Yield a token file's documents in blocks of whole ones, cut after each end-of-text id; a document is a line.

    What follows the last end of text is a document too. Raises CorruptError for a size that is not a multiple of the
    token size, InputError for a file with a NumPy header or with an id outside the vocabulary.
    """
    tokens = _mapped(path, np.dtype(dtype).newbyteorder("<"))
    start = 0
    for at in range(0, len(tokens), BLOCK_TOKENS):
        block = tokens[at : at + BLOCK_TOKENS]
        if (largest := int(block.max())) >= vocab_size:
            raise InputError(
                f"{path} holds token id {largest}, outside the tokenizer's vocabulary of {vocab_size};"
                " name the tokenizer that made the tokens"
            )
        ends = at + 1 + np.flatnonzero(block == eod_id)
        if len(ends) == 0 and at - start > MAX_DOCUMENT_TOKENS:
            raise InputError(
                f"{path} has no end-of-text id {eod_id} in more than {MAX_DOCUMENT_TOKENS} tokens;"
                " state the id that ends its documents by --eod-id"
            )
        if len(ends):
            yield _block(tokens[start : ends[-1]], np.diff(ends, prepend=start), output_dtype)
            start = int(ends[-1])
    if start < len(tokens):
        yield _block(tokens[start:], np.array([len(tokens) - start]), output_dtype)


def _mapped(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    size = path.stat().st_size
    if size % dtype.itemsize:
        raise CorruptError(
            f"{path} holds {size} bytes, not a whole number of {dtype.name} tokens;"
            " copy it again, or set npy_dtype to its type"
        )
    with naming(path), path.open("rb") as file:
        if file.read(len(NUMPY_MAGIC)) == NUMPY_MAGIC:
            raise InputError(f"{path} has a NumPy header; name headerless token files, as tofile writes them")
    return np.memmap(path, dtype, mode="r") if size else np.empty(0, dtype)


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
