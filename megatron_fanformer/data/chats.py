"""Chats for fine-tuning: read the files of conversations, and pack conversations into samples, without torch.

`prepare --chat` writes conversations in two forms:

    PREFIX.bin, PREFIX.idx, PREFIX.mask.bin         Megatron's pair, one document per conversation, and the mask
    PREFIX/input_ids.npy, PREFIX/label_mask.npy     padded rows of a fixed length, the format of OLMo's fine-tuning

The mask has one byte per token: 1 if the token is learned, that is, if it has a loss as a label. The `.npy` files have
no NumPy header.

Shapes: n conversations, t tokens of a conversation.
"""

import functools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.data.blends import PART_NAMES, TRAIN, Blend, Source, Word, as_weight, list_words, split_bounds
from megatron_fanformer.data.manifest import manifest_path, read_manifest
from megatron_fanformer.data.token_files import BIN_SUFFIX, bin_path, idx_path, read_index, refuse_stated_ids
from megatron_fanformer.errors import CorruptError, InputError, redacted
from megatron_fanformer.stores import is_url

MASK_SUFFIX = ".mask.bin"
IDS_NPY, MASK_NPY = "/input_ids.npy", "/label_mask.npy"
NPY_DTYPE, NPY_ROW_TOKENS = "uint16", 2048  # of row folders without a manifest, which OLMo's script writes
READ_BYTES = 1 << 24  # of a mask, read at a time


# -- files


@dataclass(frozen=True, eq=False)
class ChatFiles:
    """The conversations of one prefix, or of one row folder."""

    prefix: str
    ids_path: Path
    dtype: np.dtype[Any]
    mask_path: Path
    starts: np.ndarray
    """[n] int64: the number of each conversation's first token, in the ids and in the mask alike."""
    lengths: np.ndarray
    """[n] int64: the tokens of each conversation, without padding."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a conversation's ids, [t] int64, and whether each token is learned, [t] bool.

        Raises CorruptError if the mask holds anything but 0 and 1, or if no token is learned.
        """
        start, end = int(self.starts[number]), int(self.starts[number] + self.lengths[number])
        ids, mask = (values[start:end] for values in self._arrays)
        largest = mask.max(initial=0)
        if largest != 1:
            problem = "has no learned token" if largest == 0 else f"holds {largest}, not 0 or 1,"
            raise CorruptError(f"{self.mask_path} {problem} in conversation {number}; copy or prepare it again")
        return ids.astype(np.int64), mask.astype(bool)

    @functools.cached_property
    def _arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return np.memmap(self.ids_path, self.dtype, mode="r"), np.memmap(self.mask_path, np.uint8, mode="r")

    def refuse_stated_ids(self, vocab_size: int) -> None:
        """Raise InputError if the manifest states an id that is not below `vocab_size`."""
        suffix = IDS_NPY if str(self.ids_path).endswith(IDS_NPY) else BIN_SUFFIX
        refuse_stated_ids(self.prefix, suffix, self.ids_path.stat().st_size, vocab_size)


def is_row_folder(path: str | Path) -> bool:
    """Return whether a path is a folder with the rows of conversations and their mask."""
    return all(Path(f"{path}{name}").is_file() for name in (IDS_NPY, MASK_NPY))


def open_chats(prefix: str) -> ChatFiles:
    """Open the chats of a prefix or a row folder. Raises InputError if there are none, CorruptError on damage."""
    if is_row_folder(prefix):
        return _open_rows(prefix.rstrip("/"))
    mask = Path(prefix + MASK_SUFFIX)
    if not mask.is_file():
        finding = "these are token files of documents" if bin_path(prefix).is_file() else "there are no chats"
        raise InputError(f"{mask} does not exist, {finding}; name what prepare --chat has written")
    index = read_index(prefix)
    lengths = index.lengths.astype(np.int64)
    if index.documents != index.sequences:
        raise InputError(f"{idx_path(prefix)} has several sequences in a document, chats have one; prepare with --chat")
    size = mask.stat().st_size
    if size != index.tokens:
        raise CorruptError(f"{mask} holds {size} bytes for {index.tokens} tokens; copy the files of {prefix} again")
    return ChatFiles(prefix, bin_path(prefix), index.dtype, mask, starts=np.cumsum(lengths) - lengths, lengths=lengths)


def _open_rows(prefix: str) -> ChatFiles:
    """Open a row folder. A conversation ends with its last learned token, since no later token affects a loss."""
    ids, mask = Path(prefix + IDS_NPY), Path(prefix + MASK_NPY)
    manifest = read_manifest(prefix)
    dtype, row_tokens = np.dtype(NPY_DTYPE), NPY_ROW_TOKENS
    if manifest is not None and manifest.settings.chat is not None and manifest.settings.chat.max_tokens is not None:
        dtype, row_tokens = np.dtype(manifest.settings.dtype), manifest.settings.chat.max_tokens
    tokens = mask.stat().st_size  # one byte each
    if not tokens or tokens % row_tokens or ids.stat().st_size != tokens * dtype.itemsize:
        stated = "" if manifest is None else f", which {manifest_path(prefix)} states"
        raise CorruptError(
            f"{ids} and {mask} hold {ids.stat().st_size} and {tokens} bytes, not rows of {row_tokens} {dtype} ids and "
            f"as many bytes of mask{stated}; copy them again"
        )
    learned = np.memmap(mask, bool, mode="r").reshape(-1, row_tokens)
    blocks = np.array_split(learned, -(-tokens // READ_BYTES))  # so that memory holds little of a large mask
    # The argmax over a reversed row is the number of tokens after the last learned one; a row without one gets 0.
    lengths = np.concatenate(
        [np.where(block.any(axis=1), row_tokens - block[:, ::-1].argmax(axis=1), 0) for block in blocks]
    ).astype(np.int64)
    if not lengths.all():
        raise CorruptError(
            f"row {int(np.argmin(lengths))} (from 0) of {mask} has no learned token; leave it out of both files"
        )
    return ChatFiles(prefix, ids, dtype, mask, starts=np.arange(0, tokens, row_tokens, dtype=np.int64), lengths=lengths)


# -- sets of chats


def parse_chats(items: Sequence[Word]) -> Blend:
    """Parse a list of prefixes and row folders of chats; to name one twice repeats its chats. Raises InputError."""
    words = list_words(items)
    if not words:
        raise InputError("the list is empty; name at least one prefix that prepare --chat has written")
    if weights := [word for word in words if as_weight(word) is not None]:
        raise InputError(
            f"{weights[0]!r} is a weight, and chats have none: an epoch takes every conversation once; name a prefix "
            "twice to have its conversations twice"
        )
    return Blend([Source((word.rstrip("/"),)) for word in words], None)


def chat_problems(name: str, items: Sequence[Word]) -> list[str]:
    """List the problems of a list of chats, which the setting `name` holds, without opening the chats."""
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
    """The conversations of a set of chats, numbered source by source; with a split, one part of each source."""

    def __init__(self, blend: Blend, *, split: str | None = None, part: int = TRAIN) -> None:
        """Open the chats. Raises InputError if there is no conversation, and the errors of `open_chats`."""
        bounds = (0.0, 1.0) if split is None else split_bounds(split)[part]
        assert bounds is not None, "split_problems refuses a split without this part"
        prefixes = [source.paths[0] for source in blend.sources]
        opened = {prefix: open_chats(prefix) for prefix in prefixes}
        self._sources: list[ChatFiles] = [opened[prefix] for prefix in prefixes]
        self._begins = [round(bounds[0] * len(chats)) for chats in self._sources]  # counted in each source's files
        ends = [round(bounds[1] * len(chats)) for chats in self._sources]  # likewise
        ranges = list(zip(self._sources, self._begins, ends, strict=True))
        self._ends = np.cumsum([end - begin for _, begin, end in ranges])  # the end of each source, counted in this set
        self.lengths: np.ndarray = np.concatenate([chats.lengths[begin:end] for chats, begin, end in ranges])
        """[n] int64: the tokens of each conversation."""
        if not self.lengths.any():
            where = "in them" if split is None else f"left for {PART_NAMES[part]} by data.split {split}"
            raise InputError(f"{', '.join(prefixes)}: no conversation is {where}; name more chats")

    def refuse_unlearned(self, name: str, seq_length: int) -> None:
        """Raise InputError if no chat of validation set `name` has a learned label in the first `seq_length` tokens."""
        places = map(self.locate, np.flatnonzero(self.lengths).tolist())  # of conversations that are not empty
        masks = (chats[number][1] for chats, number in places)
        if not any(mask[1:seq_length].any() for mask in masks):  # the first token is no label
            raise InputError(
                f"validation set {name} has no learned token within the first {seq_length} of any conversation; name "
                "other chats, or raise model.seq_length"
            )

    def locate(self, number: int) -> tuple[ChatFiles, int]:
        """Return the files that hold a conversation of this set, and the conversation's number in these files."""
        source = int(np.searchsorted(self._ends, number, side="right"))
        before = int(self._ends[source - 1]) if source else 0
        return self._sources[source], self._begins[source] + int(number) - before


# -- packing


def first_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Put each item into the first bin that has room for it; return the number of each item's bin, [n] int64.

    `lengths` are [n] integers from 1 to `capacity`, in the order of placement. A binary tree finds a bin in a number of
    steps that grows with the logarithm of the number of bins.
    """
    # At most one bin is less than half full: the items of a second one would have fitted into the first one.
    most_bins = min(len(lengths), 2 * int(lengths.sum()) // capacity + 1)
    leaves = 1 << max(0, most_bins - 1).bit_length()  # a power of two, at least `most_bins`
    # A tree with root 1, in which node i has the children 2i and 2i + 1. room[leaves + b] is the room left in bin b. A
    # node with children has the larger room of the two, which is the most in any bin below the node.
    room = array("q", [capacity]) * (2 * leaves)
    bins = np.empty(len(lengths), np.int64)
    for item, length in enumerate(map(int, lengths)):
        node = 1
        while node < leaves:  # down to the first bin with room
            node *= 2
            if room[node] < length:  # no bin below the left child has room: take the right child
                node += 1
        bins[item] = node - leaves
        room[node] -= length
        while node > 1:  # up again, to update the rooms above the bin
            node //= 2
            largest = max(room[2 * node], room[2 * node + 1])
            if room[node] == largest:
                break
            room[node] = largest
    return bins


@dataclass(frozen=True)
class Packing:
    """The conversations in each sample of an epoch."""

    members: np.ndarray
    """[conversations] int64: the numbers of the conversations, from the first sample to the last."""
    starts: np.ndarray
    """[samples + 1] int64: the position in `members` at which each sample begins, and the length of `members`."""
    capacity: int
    """Tokens of a sample."""
    tokens: int
    """Tokens of all conversations, after cutting."""
    cut: int
    """The number of conversations longer than a sample; each is cut at the end of a sample."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def conversations(self, sample: int) -> np.ndarray:
        """Return the numbers of a sample's conversations, in their order within the sample."""
        return self.members[self.starts[sample] : self.starts[sample + 1]]

    def describe(self) -> str:
        """Return a line with the packing's counts, and how full the samples are."""
        longer = f"; {self.cut:,} of the conversations cut to fit" if self.cut else ""
        return (
            f"{len(self.members):,} conversations of {self.tokens:,} tokens in {len(self):,} samples of"
            f" {self.capacity:,}, {self.tokens / (len(self) * self.capacity):.1%} filled{longer}"
        )


def pack(lengths: np.ndarray, capacity: int, *, seed: int) -> Packing:
    """Pack conversations of `lengths` tokens, [n], into samples of `capacity` tokens: first fit, in a random order.

    Conversations longer than a sample are cut to fill one, and empty ones are left out.
    """
    order = np.random.Generator(np.random.PCG64(seed)).permutation(np.flatnonzero(lengths))
    fitted = np.minimum(lengths[order], capacity)
    bins = first_fit(fitted, capacity)
    by_bin = np.argsort(bins, kind="stable")  # positions in `order`
    bin_count = int(bins.max(initial=-1)) + 1
    starts = np.searchsorted(bins[by_bin], np.arange(bin_count + 1))  # the last one is the number of conversations
    return Packing(order[by_bin], starts, capacity, tokens=int(fitted.sum()), cut=int((lengths > capacity).sum()))
