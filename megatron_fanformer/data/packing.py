"""Conversations packed into samples of one length: first fit, in an order drawn from the seed.

Each goes, whole, into the first sample that has room for it. A tree over the room that is left finds that sample in
a logarithm of their number, so that a million conversations take seconds; its root knows the largest room of all.
"""

from array import array
from dataclasses import dataclass

import numpy as np


def first_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """[n] int64: the bin of each item, where each goes into the first bin that has room for it.

    Args:
        lengths: [n] integers from 1 to `capacity`, in the order in which they are placed.
        capacity: what a bin holds.
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
    """Which conversations each sample of an epoch holds."""

    members: np.ndarray
    """[conversations] int64: their numbers, sample after sample."""
    starts: np.ndarray
    """[samples + 1] int64: where each sample's begin in `members`, and their number."""
    capacity: int
    """Tokens of a sample."""
    tokens: int
    """Of all conversations, without what is cut off."""
    cut: int
    """Conversations that are longer than a sample, and end with it."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of(self, sample: int) -> np.ndarray:
        """The numbers of a sample's conversations, in the order in which they stand in it."""
        return self.members[self.starts[sample] : self.starts[sample + 1]]

    def in_words(self) -> str:
        """What was packed, and how well."""
        longer = f"; {self.cut:,} of them longer, and cut there" if self.cut else ""
        return (
            f"{len(self.members):,} conversations of {self.tokens:,} tokens in {len(self):,} samples of"
            f" {self.capacity:,}, {self.tokens / (len(self) * self.capacity):.1%} filled{longer}"
        )


def pack(lengths: np.ndarray, capacity: int, *, seed: int) -> Packing:
    """Pack conversations into samples; the packing depends on these arguments alone.

    Args:
        lengths: [n] tokens of each; what is longer than a sample fills one, and what is empty is left out.
        capacity: tokens of a sample.
    """
    order = np.random.Generator(np.random.PCG64(seed)).permutation(np.flatnonzero(lengths))
    fitted = np.minimum(lengths[order], capacity)
    bins = first_fit(fitted, capacity)
    by_bin = np.argsort(bins, kind="stable")
    starts = np.searchsorted(bins[by_bin], np.arange(int(bins.max(initial=-1)) + 2))
    return Packing(order[by_bin], starts, capacity, int(fitted.sum()), int((lengths > capacity).sum()))
