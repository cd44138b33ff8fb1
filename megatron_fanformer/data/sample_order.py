"""The order in which an epoch takes the samples of a set: all of them once.

Up to 2^32 samples it is NumPy's PCG64 shuffle of their numbers, seeded with seed + epoch, which is the order of the
authors' own loader. A large one is stored once, in the folder of the index cache, and read an entry at a time: all
ranks of a node have it in the same pages of the system's cache, and not in memory of their own. Beyond 2^32, where a
shuffle would take tens of minutes and 40 GB, each entry is computed when it is needed, by a keyed permutation.
"""

import logging
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.durable_files import publish, take_lock
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.runtime.device import return_freed_memory

logger = logging.getLogger(__name__)

MOST_SHUFFLED = 1 << 32
LEAST_STORED = 1 << 24  # samples: 64 MiB a rank
ROUNDS = 6
MASK_64 = (1 << 64) - 1


def shuffled(samples: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return [samples] uint32: the numbers of all samples in an epoch's order. Epochs count from 0."""
    order = np.arange(samples, dtype=np.uint32)
    np.random.Generator(np.random.PCG64(seed + epoch)).shuffle(order)
    return order


def epoch_order(samples: int, *, seed: int, epoch: int, cache: Path | None = None) -> Any:
    """Return the numbers of all samples in an epoch's order. Epochs count from 0.

    Args:
        cache: folder in which a large one is stored; None: it is made in memory.

    Raises:
        InputError: the folder cannot be written.
        CorruptError: the stored one cannot be read.
    """
    if samples > MOST_SHUFFLED:
        return KeyedPermutation(samples, seed=seed + epoch)
    if cache is None or samples < LEAST_STORED:
        return shuffled(samples, seed=seed, epoch=epoch)
    return _stored(samples, seed=seed, epoch=epoch, cache=cache)


def _stored(samples: int, *, seed: int, epoch: int, cache: Path) -> np.ndarray:
    """Return the shuffle in its file, which is named by all that decides it, and appears when it is whole."""
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


class KeyedPermutation(Sequence[int]):
    """The numbers 0 to samples - 1 in an order that a seed decides, each computed by itself.

    It is a Feistel network over the smallest even number of bits that holds them, whose values beyond the last sample
    are permuted on until one is below it (cycle walking): at most four times on average. Source: Black and Rogaway,
    "Ciphers with Arbitrary Finite Domains", 2002.
    """

    def __init__(self, samples: int, *, seed: int) -> None:
        self._samples = samples
        self._half = max(1, ((samples - 1).bit_length() + 1) // 2)
        self._keys = [int(key) for key in np.random.PCG64(seed).random_raw(ROUNDS)]

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, position: int) -> int:  # type: ignore[override]  # no slices
        if not 0 <= position < self._samples:
            raise IndexError(position)
        value = self._permuted(int(position))
        while value >= self._samples:
            value = self._permuted(value)
        return value

    def _permuted(self, value: int) -> int:
        half, mask = self._half, (1 << self._half) - 1
        left, right = value >> half, value & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return left << half | right


def _mixed(value: int) -> int:
    """Return 64 bits that depend on all bits of a value: the finalizer of splitmix64 (Steele, Lea and Flood, 2014)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & MASK_64
    value = (value ^ value >> 27) * 0x94D049BB133111EB & MASK_64
    return value ^ value >> 31
