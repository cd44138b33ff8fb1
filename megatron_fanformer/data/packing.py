"""The conversations of a set of chats, and their packing into samples of one length; torch is not imported.

They are placed first fit, in an order drawn from the seed: each goes, whole, into the first sample that has room for
it. A tree over the room that is left finds that sample in a logarithm of their number, so that a million conversations
take seconds; its root knows the largest room of all.
"""

from array import array
from dataclasses import dataclass

import numpy as np

from megatron_fanformer.data.blends import PART_NAMES, Blend, parse_chats, split_bounds
from megatron_fanformer.data.chat_files import ChatFiles, open_chats
from megatron_fanformer.data.config import SPLIT_VALIDATION, DataConfig
from megatron_fanformer.data.sample_counts import TRAIN, VALIDATION
from megatron_fanformer.errors import InputError

# -- conversations


class Conversations:
    """Conversations of a set of chats, numbered source after source; with a split, those of one part of each source.

    Raises:
        InputError: no such files, or a part without conversations.
        CorruptError: files that disagree with one another.
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


def training_conversations(config: DataConfig) -> Conversations:
    """Open the training set; raises as `Conversations`."""
    return Conversations(parse_chats(config.train_data), split=config.applied_split)


def validation_conversations(config: DataConfig) -> dict[str, Conversations]:
    """Return the validation sets by name; raises as `Conversations`."""
    if config.applied_split is not None:
        blend = parse_chats(config.train_data)
        return {SPLIT_VALIDATION: Conversations(blend, split=config.applied_split, part=VALIDATION)}
    return {name: Conversations(parse_chats(items)) for name, items in config.valid_data.items()}


# -- packing


def first_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return [n] int64: the bin of each item, which is the first one that has room for it.

    Args:
        lengths: [n] integers from 1 to `capacity`, in the order in which they are placed.
        capacity: of a bin.
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

    def in_words(self) -> str:
        """Describe the packing: its counts, and how full the samples are."""
        longer = f"; {self.cut:,} of them longer, and cut there" if self.cut else ""
        return (
            f"{len(self.members):,} conversations of {self.tokens:,} tokens in {len(self):,} samples of"
            f" {self.capacity:,}, {self.tokens / (len(self) * self.capacity):.1%} filled{longer}"
        )


def pack(lengths: np.ndarray, capacity: int, *, seed: int) -> Packing:
    """Pack conversations into samples; the packing depends on these arguments alone.

    Args:
        lengths: [n] tokens of each; a longer one than a sample fills it, and empty ones are left out.
        capacity: tokens of a sample.
    """
    order = np.random.Generator(np.random.PCG64(seed)).permutation(np.flatnonzero(lengths))
    fitted = np.minimum(lengths[order], capacity)
    bins = first_fit(fitted, capacity)
    by_bin = np.argsort(bins, kind="stable")
    starts = np.searchsorted(bins[by_bin], np.arange(int(bins.max(initial=-1)) + 2))
    return Packing(order[by_bin], starts, capacity, int(fitted.sum()), int((lengths > capacity).sum()))
