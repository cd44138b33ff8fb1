"""The order in which each epoch takes the samples of a set: all of them once.

It is NumPy's PCG64 shuffle of their numbers, seeded with seed + epoch, which is the order of the authors' own loader. A
large one is stored once, in the folder of the index cache, and read an entry at a time: all ranks of a node have it in
the same pages of the system's cache, and not in memory of their own.
"""

import logging
import os
import threading
import uuid
from pathlib import Path

import numpy as np

from megatron_fanformer.durable_files import publish, take_lock
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.runtime.device import return_freed_memory

logger = logging.getLogger(__name__)

LEAST_STORED = 1 << 24  # samples: 64 MiB a rank


class Epochs:
    """The samples of a set, epoch after epoch: base of map-style datasets for a DataLoader."""

    def __init__(self, epoch_samples: int, *, seed: int, samples: int | None, cache: Path | None = None) -> None:
        """`samples` is the length, over as many epochs as it takes; None: one epoch. `cache`: see `epoch_order`."""
        self.epoch_samples, self._seed, self._cache = epoch_samples, seed, cache
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
                self._order = (epoch, epoch_order(self.epoch_samples, seed=self._seed, epoch=epoch, cache=self._cache))
            return self._order[1]


def shuffled(samples: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return [samples] integers: the numbers of all samples in an epoch's order. Epochs count from 0."""
    order = np.arange(samples, dtype=np.uint32 if samples <= 1 << 32 else np.uint64)
    np.random.Generator(np.random.PCG64(seed + epoch)).shuffle(order)
    return order


def epoch_order(samples: int, *, seed: int, epoch: int, cache: Path | None = None) -> np.ndarray:
    """Return `shuffled`; a large order is stored in a file, named by all that decides it, and mapped.

    Without a `cache`, the folder of such files, every order is made in memory.
    """
    if cache is None or samples < LEAST_STORED:
        return shuffled(samples, seed=seed, epoch=epoch)
    path = cache / "orders" / f"{samples}-{seed + epoch}.npy"
    try:
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = take_lock(path.with_suffix(".lock"), wait=True)  # one process of a node, while the others wait
            assert lock is not None
            try:
                if not path.is_file():
                    logger.info("storing the order of %d samples in %s", samples, path)
                    partial = path.with_name(f".{uuid.uuid4().hex}.npy")
                    np.save(partial, shuffled(samples, seed=seed, epoch=epoch))
                    publish(partial, path)
                    return_freed_memory()
            finally:
                os.close(lock)
    except OSError as error:
        raise InputError(
            f"the order of samples cannot be stored in {path} ({error.strerror}); set data.cache_path to a folder "
            f"with {4 * samples / 1e9:.2g} GB"
        ) from error
    try:
        order: np.ndarray = np.load(path, mmap_mode="r")
        if order.shape != (samples,):
            raise ValueError(f"it has {order.shape}")
        return order
    except (OSError, ValueError, EOFError) as error:
        raise CorruptError(f"{path} does not hold the order of {samples} samples; remove it and resume") from error
