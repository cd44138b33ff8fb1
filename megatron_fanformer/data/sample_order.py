"""Bases of map-style datasets: one whose epochs are shuffles of a set of samples, and one that wraps a dataset.

An epoch takes every sample of the set once. Its order is NumPy's PCG64 shuffle of the samples' numbers, seeded with
seed + epoch, as in the authors' own loader.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class SampleWrapper:
    """A dataset that has the samples of another one, perhaps changed, in the same order."""

    samples: Sequence[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.samples[index]


class Epochs:
    """A dataset that repeats the samples of a set, epoch after epoch."""

    def __init__(self, epoch_samples: int, *, seed: int, samples: int | None) -> None:
        """`epoch_samples` is the size of the set, `samples` the length of the dataset; None: one epoch."""
        self.epoch_samples, self._seed = epoch_samples, seed
        self._length = epoch_samples if samples is None else samples
        self._order: tuple[int, np.ndarray] | None = None
        self._lock = threading.Lock()
        self._order_of(0)  # now, so that forked loader processes share the first order

    def __len__(self) -> int:
        return self._length

    def number(self, index: int) -> int:
        """Return the number, in the set, of the sample at `index`."""
        if not 0 <= index < self._length:
            raise IndexError(index)
        epoch, position = divmod(int(index), self.epoch_samples)
        return int(self._order_of(epoch)[position])

    def _order_of(self, epoch: int) -> np.ndarray:
        """Return the numbers of the samples in the order of an epoch; the last order is kept."""
        with self._lock:  # several threads read samples from remote stores
            if self._order is None or self._order[0] != epoch:
                self._order = None  # frees its memory before the next order is computed
                self._order = (epoch, shuffle_numbers(self.epoch_samples, seed=self._seed, epoch=epoch))
            return self._order[1]


def shuffle_numbers(samples: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return the numbers of all samples in the order of an epoch, [samples] integers. Epochs count from 0."""
    order = np.arange(samples, dtype=np.uint32 if samples <= 1 << 32 else np.uint64)
    np.random.Generator(np.random.PCG64(seed + epoch)).shuffle(order)
    return order
