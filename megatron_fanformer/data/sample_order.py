"""The order in which each epoch takes the samples of a set: all of them once.

It is NumPy's PCG64 shuffle of their numbers, seeded with seed + epoch, which is the order of the authors' own loader.
"""

import threading

import numpy as np


class Epochs:
    """The samples of a set, epoch after epoch: base of map-style datasets for a DataLoader."""

    def __init__(self, epoch_samples: int, *, seed: int, samples: int | None) -> None:
        """`samples` is the length, over as many epochs as it takes; None: one epoch."""
        self.epoch_samples, self._seed = epoch_samples, seed
        self._length = epoch_samples if samples is None else samples
        self._order: tuple[int, np.ndarray] | None = None
        self._lock = threading.Lock()
        self._order_of(0)

    def __len__(self) -> int:
        return self._length

    def number(self, index: int) -> int:
        """Return which of an epoch's samples is at `index`, by its number in the set."""
        if not 0 <= index < self._length:
            raise IndexError(index)
        epoch, position = divmod(int(index), self.epoch_samples)
        return int(self._order_of(epoch)[position])

    def _order_of(self, epoch: int) -> np.ndarray:
        with self._lock:  # samples on other stores are read by threads
            if self._order is None or self._order[0] != epoch:
                self._order = None  # before the next is computed: one at a time in memory
                self._order = (epoch, shuffled(self.epoch_samples, seed=self._seed, epoch=epoch))
            return self._order[1]


def shuffled(samples: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return [samples] integers: the numbers of all samples in an epoch's order. Epochs count from 0."""
    order = np.arange(samples, dtype=np.uint32 if samples <= 1 << 32 else np.uint64)
    np.random.Generator(np.random.PCG64(seed + epoch)).shuffle(order)
    return order
