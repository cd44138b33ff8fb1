"""Chats for fine-tuning: the files of conversations, and their packing into samples; torch is not imported.

`prepare --chat` writes conversations in two forms:

    PREFIX.bin, PREFIX.idx, PREFIX.mask.bin         Megatron's pair, each conversation a document; a byte for each token
    PREFIX/input_ids.npy, PREFIX/label_mask.npy     rows of a fixed length, padded, as OLMo's fine-tuning reads them

A mask has 1 where a token is learned: where it is a label with a loss, whatever comes before it. Neither `.npy` file
has NumPy's header.
"""

import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.data.blends import PART_NAMES, TRAIN, Blend, Source, Word, as_weight, blend_words, split_bounds
from megatron_fanformer.data.manifest import manifest_path, read_manifest
from megatron_fanformer.data.token_files import BIN_SUFFIX, bin_path, idx_path, read_index, refuse_stated_ids
from megatron_fanformer.errors import CorruptError, InputError, redacted
from megatron_fanformer.stores import is_url

MASK_SUFFIX = ".mask.bin"
IDS_NPY, MASK_NPY = "/input_ids.npy", "/label_mask.npy"
NPY_DTYPE, NPY_ROW_TOKENS = "uint16", 2048  # of files without a manifest: those of OLMo's script
READ_BYTES = 1 << 24  # of a mask, at a time


# -- files


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

        Raises CorruptError if the mask holds anything but 0 and 1, or if no token is learned.
        """
        start, count = int(self.starts[number]), int(self.lengths[number])
        ids, mask = (array[start : start + count] for array in self._mapped)
        largest = mask.max(initial=0)
        if largest != 1:
            problem = "has no learned token" if largest == 0 else f"holds {largest}, not 0 or 1,"
            raise CorruptError(f"{self.mask_path} {problem} in conversation {number}; copy or prepare it again")
        return ids.astype(np.int64), mask.astype(bool)

    @functools.cached_property
    def _mapped(self) -> tuple[np.ndarray, np.ndarray]:
        return np.memmap(self.ids_path, self.dtype, mode="r"), np.memmap(self.mask_path, np.uint8, mode="r")

    def refuse_stated_ids(self, vocab_size: int) -> None:
        """Raise InputError if the manifest states an id outside [0, vocab_size)."""
        suffix = IDS_NPY if str(self.ids_path).endswith(IDS_NPY) else BIN_SUFFIX
        refuse_stated_ids(self.prefix, suffix, self.ids_path.stat().st_size, vocab_size)


def is_row_folder(path: str | Path) -> bool:
    """Return whether a path is a folder in the form of OLMo's script."""
    return all(Path(f"{path}{name}").is_file() for name in (IDS_NPY, MASK_NPY))


def open_chats(prefix: str) -> ChatFiles:
    """Open a prefix of `prepare --chat`, or a folder in the form of OLMo's script. Raises InputError, CorruptError."""
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


def _open_rows(prefix: str) -> ChatFiles:
    """Open rows, each a conversation that ends with its last learned token: nothing later affects a loss."""
    ids, mask = Path(prefix + IDS_NPY), Path(prefix + MASK_NPY)
    manifest = read_manifest(prefix)
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
    learned = np.memmap(mask, bool, mode="r").reshape(-1, row)
    lengths = np.concatenate(
        [
            np.where(block.any(axis=1), row - block[:, ::-1].argmax(axis=1), 0)
            for block in np.array_split(learned, -(-tokens // READ_BYTES))
        ]
    ).astype(np.int64)
    if not lengths.all():
        raise CorruptError(
            f"row {int(np.argmin(lengths))} (from 0) of {mask} has no learned token; leave it out of both files"
        )
    return ChatFiles(prefix, ids, dtype, mask, np.arange(len(lengths), dtype=np.int64) * row, lengths)


# -- sets of chats


def parse_chats(items: Sequence[Word]) -> Blend:
    """Read a list of chats' prefixes, one list entry per word; a prefix that is named twice counts twice."""
    words = blend_words(items)
    if not words:
        raise InputError("the list is empty; name at least one prefix that prepare --chat has written")
    if (weight := next((word for word in words if as_weight(word) is not None), None)) is not None:
        raise InputError(
            f"{weight!r} is a weight, and chats have none: an epoch takes every conversation once; name a prefix twice "
            "to have its conversations twice"
        )
    return Blend([Source((word.rstrip("/"),)) for word in words], None)


def chat_problems(name: str, items: Sequence[Word]) -> list[str]:
    """List the problems of a list of chats; `name` is the setting that holds it. None of them is opened."""
    try:
        blend = parse_chats(items)
    except InputError as error:
        return [f"{name}: {error}"]
    prefixes = [source.paths[0] for source in blend.sources]
    if url := next(filter(is_url, prefixes), None):
        return [f"{name}: {redacted(url)} is on another store, where chats are not read; copy them to this machine"]
    return [
        f"{name}: {prefix}{MASK_SUFFIX} does not exist; name what prepare --chat has written"
        for prefix in prefixes
        if not (is_row_folder(prefix) or Path(prefix + MASK_SUFFIX).is_file())
    ]


class Conversations:
    """Conversations of a set of chats, numbered source after source; with a split, those of one part of each source.

    Raises InputError for a part without conversations, and the errors of `open_chats`.
    """

    def __init__(self, blend: Blend, *, split: str | None = None, part: int = TRAIN) -> None:
        bounds = (0.0, 1.0) if split is None else split_bounds(split)[part]
        assert bounds is not None, "a split without the part is refused before"
        prefixes = [source.paths[0] for source in blend.sources]
        opened = {prefix: open_chats(prefix) for prefix in prefixes}
        self._sources: list[ChatFiles] = [opened[prefix] for prefix in prefixes]
        ranges = [[round(bound * len(chats)) for bound in bounds] for chats in self._sources]
        self._begins = [begin for begin, _ in ranges]
        self._ends = np.cumsum([end - begin for begin, end in ranges])
        lengths = [chats.lengths[begin:end] for chats, (begin, end) in zip(self._sources, ranges, strict=True)]
        self.lengths: np.ndarray = np.concatenate(lengths)
        """[n] int64, tokens of each."""
        if not self.lengths.any():
            of_part = "" if split is None else f" left for {PART_NAMES[part]} by data.split {split}"
            raise InputError(f"{', '.join(prefixes)}: no conversation is{of_part or ' in them'}; name more chats")

    def refuse_unlearned(self, name: str, seq_length: int) -> None:
        """Raise InputError if no token within `seq_length` of a conversation's first is a learned label."""
        places = map(self.place, np.flatnonzero(self.lengths).tolist())
        if not any(chats[number][1][1:seq_length].any() for chats, number in places):
            raise InputError(
                f"validation set {name} has no learned token within the first {seq_length} of any conversation; name "
                "other chats, or raise model.seq_length"
            )

    def place(self, number: int) -> tuple[ChatFiles, int]:
        """Return the files of a conversation, and its number there."""
        source = int(np.searchsorted(self._ends, number, side="right"))
        before = int(self._ends[source - 1]) if source else 0
        return self._sources[source], self._begins[source] + int(number) - before


# -- packing


def first_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return [n] int64: the bin of each item, which is the first one that has room for it.

    A tree over the room that is left finds that bin in a logarithm of their number; its root knows the largest room.
    `lengths` are [n] integers from 1 to `capacity`, in the order in which they are placed.
    """
    # No two bins are at most half full: what the later one holds would have gone into the earlier.
    most_bins = min(len(lengths), 2 * int(lengths.sum()) // capacity + 1)
    leaves = 1 << max(0, most_bins - 1).bit_length()
    room = array("q", [capacity]) * (2 * leaves)  # of each bin, from `leaves` on; of node n the larger of 2n and 2n + 1
    bins = np.empty(len(lengths), np.int64)
    for item, length in enumerate(map(int, lengths)):
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        bins[item] = node - leaves
        room[node] -= length
        while node > 1:
            node //= 2
            largest = max(room[2 * node], room[2 * node + 1])
            if room[node] == largest:
                break
            room[node] = largest
    return bins


@dataclass(frozen=True)
class Packing:
    """The conversations of each sample of an epoch."""

    members: np.ndarray
    """[conversations] int64: their numbers, sample after sample."""
    starts: np.ndarray
    """[samples + 1] int64: where each sample's conversations begin in `members`, and at the end the length of
    `members`."""
    capacity: int
    """Tokens of a sample."""
    tokens: int
    """Tokens of all conversations, without what is cut off."""
    cut: int
    """Conversations that are longer than a sample, and end with it."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of(self, sample: int) -> np.ndarray:
        """Return the numbers of a sample's conversations, in the order in which they stand in it."""
        return self.members[self.starts[sample] : self.starts[sample + 1]]

    def describe(self) -> str:
        """Return a line with the packing's counts, and how full the samples are."""
        longer = f"; {self.cut:,} of them longer, and cut there" if self.cut else ""
        return (
            f"{len(self.members):,} conversations of {self.tokens:,} tokens in {len(self):,} samples of"
            f" {self.capacity:,}, {self.tokens / (len(self) * self.capacity):.1%} filled{longer}"
        )


def pack(lengths: np.ndarray, capacity: int, *, seed: int) -> Packing:
    """Pack conversations of [n] tokens into samples of `capacity`, first fit in an order drawn from the seed.

    A longer one than a sample fills it, and empty ones are left out.
    """
    order = np.random.Generator(np.random.PCG64(seed)).permutation(np.flatnonzero(lengths))
    fitted = np.minimum(lengths[order], capacity)
    bins = first_fit(fitted, capacity)
    by_bin = np.argsort(bins, kind="stable")
    starts = np.searchsorted(bins[by_bin], np.arange(int(bins.max(initial=-1)) + 2))
    return Packing(order[by_bin], starts, capacity, int(fitted.sum()), int((lengths > capacity).sum()))
