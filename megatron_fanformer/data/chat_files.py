"""Files of chats: the token ids of conversations, and which of them are learned.

`prepare --chat` writes them in two forms:

    PREFIX.bin, PREFIX.idx, PREFIX.mask.bin         Megatron's pair, each conversation a document; a byte for each token
    PREFIX/input_ids.npy, PREFIX/label_mask.npy     rows of a fixed length, padded, as OLMo's fine-tuning reads them

A mask has 1 where a token is learned: where it is a label with a loss, whatever comes before it. Neither `.npy` file
has NumPy's header.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.data.manifest import manifest_of, manifest_path, read_any_manifest
from megatron_fanformer.data.token_files import BIN_SUFFIX, bin_path, idx_path, read_index, refuse_largest_id
from megatron_fanformer.errors import CorruptError, InputError

MASK_SUFFIX = ".mask.bin"
IDS_NPY, MASK_NPY = "/input_ids.npy", "/label_mask.npy"
NPY_DTYPE, NPY_ROW_TOKENS = "uint16", 2048  # of files without a manifest: those of OLMo's script
READ_BYTES = 1 << 24


@dataclass(frozen=True, eq=False)
class ChatFiles:
    """The conversations of one prefix, or of one folder of rows."""

    prefix: str
    ids_path: Path
    dtype: np.dtype[Any]
    mask_path: Path
    starts: np.ndarray
    """[n] int64: where each conversation begins in both files, in tokens."""
    lengths: np.ndarray
    """[n] int64: tokens of each, without padding."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a conversation's ids, [t] int64, and which of them are learned, [t] bool.

        Raises:
            IndexError: there is no such conversation.
            CorruptError: the mask holds something else than 0 and 1, or nothing is learned, which `prepare --chat`
                never writes.
        """
        start, count = int(self.starts[number]), int(self.lengths[number])
        ids, mask = (array[start : start + count] for array in self._mapped)
        if not count or mask.max() != 1:
            what = f"holds {mask.max()}, not 0 or 1," if mask.any() else "has no learned token"
            raise CorruptError(f"{self.mask_path} {what} in conversation {number}; copy or prepare it again")
        return ids.astype(np.int64), mask.astype(bool)

    @functools.cached_property
    def _mapped(self) -> tuple[np.ndarray, np.ndarray]:
        return np.memmap(self.ids_path, self.dtype, mode="r"), np.memmap(self.mask_path, np.uint8, mode="r")

    def check_ids(self, vocab_size: int) -> None:
        """Raise InputError if the manifest states an id outside [0, vocab_size)."""
        suffix = IDS_NPY if str(self.ids_path).endswith(IDS_NPY) else BIN_SUFFIX
        stated = manifest_of(self.prefix, suffix, self.ids_path.stat().st_size)
        refuse_largest_id(None if stated is None else stated[1].max_token_id, vocab_size, self.prefix)


def open_chats(prefix: str) -> ChatFiles:
    """Open a prefix of `prepare --chat`, or a folder in the form of OLMo's script.

    Raises:
        InputError: no such files, or token files without a mask.
        CorruptError: files that disagree with one another, or with their manifest.
    """
    if is_row_folder(prefix):
        return _open_rows(prefix.rstrip("/"))
    mask = Path(prefix + MASK_SUFFIX)
    if not mask.is_file():
        what = "these are token files of documents" if bin_path(prefix).is_file() else "there are no chats"
        raise InputError(f"{mask} does not exist, {what}; name what prepare --chat has written")
    index = read_index(prefix)
    lengths = index.lengths.astype(np.int64)
    if index.documents != index.sequences:
        raise InputError(
            f"{idx_path(prefix)} has several sequences in a document, chats have one; prepare them with --chat"
        )
    mask_bytes = mask.stat().st_size
    if mask_bytes != index.tokens:
        raise CorruptError(
            f"{mask} holds {mask_bytes} bytes for {index.tokens} tokens; copy the files of {prefix} again"
        )
    return ChatFiles(prefix, bin_path(prefix), index.dtype, mask, np.cumsum(lengths) - lengths, lengths)


def count_learned(mask: Path) -> int:
    """Return the learned tokens of a file of masks, which is read from end to end.

    Raises CorruptError for a byte that is neither 0 nor 1.
    """
    total = 0
    with mask.open("rb") as stream:
        while len(block := np.fromfile(stream, np.uint8, READ_BYTES)):
            if block.max() > 1:
                raise CorruptError(f"{mask} holds {block.max()}, a mask holds 0 and 1 alone; copy or prepare it again")
            total += int(block.sum(dtype=np.int64))
    return total


def is_row_folder(path: str | Path) -> bool:
    """Return whether a path is a folder in the form of OLMo's script."""
    return all(Path(f"{path}{name}").is_file() for name in (IDS_NPY, MASK_NPY))


def _open_rows(prefix: str) -> ChatFiles:
    """Open rows, each a conversation that ends with its last learned token: nothing later has a loss, or affects
    one.
    """
    ids, mask = Path(prefix + IDS_NPY), Path(prefix + MASK_NPY)
    manifest = read_any_manifest(prefix)
    dtype, row = np.dtype(NPY_DTYPE), NPY_ROW_TOKENS
    if manifest is not None and manifest.settings.chat is not None and manifest.settings.chat.max_tokens is not None:
        dtype, row = np.dtype(manifest.settings.dtype), manifest.settings.chat.max_tokens
    tokens = mask.stat().st_size
    if not tokens or tokens % row or ids.stat().st_size != tokens * dtype.itemsize:
        stated = "" if manifest is None else f", which {manifest_path(prefix)} states"
        raise CorruptError(
            f"{ids} and {mask} hold {ids.stat().st_size} and {tokens} bytes, not rows of {row} {dtype} ids and as many"
            f" bytes of mask{stated}; copy them again"
        )
    lengths = np.concatenate(list(_row_lengths(mask, row)))
    if not lengths.all():
        raise CorruptError(
            f"row {int(np.argmin(lengths))} (from 0) of {mask} has no learned token; leave it out of both files"
        )
    return ChatFiles(prefix, ids, dtype, mask, np.arange(len(lengths), dtype=np.int64) * row, lengths)


def _row_lengths(mask: Path, row: int) -> Iterator[np.ndarray]:
    """Yield each row's number of tokens up to the last learned one, block by block."""
    with mask.open("rb") as stream:
        while len(block := np.fromfile(stream, np.uint8, max(1, READ_BYTES // row) * row)):
            learned = block.reshape(-1, row) != 0
            yield np.where(learned.any(axis=1), row - learned[:, ::-1].argmax(axis=1), 0).astype(np.int64)
