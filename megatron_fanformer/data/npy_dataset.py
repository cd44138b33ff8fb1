"""Samples of the paper's .npy files, in the order in which the authors' own loader takes them.

A sample is a run of seq_length tokens of one file, cut from its beginning on; a file's tail that is shorter than a
sample is not used. Each epoch takes all samples of all files once (`sample_order`).
"""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_fanformer.data.npy_files import NpyFile, whole_samples
from megatron_fanformer.data.sample_order import epoch_order
from megatron_fanformer.data.token_files import refuse_ids_read


class Epochs:
    """The samples of a set, epoch after epoch: base of map-style datasets for a DataLoader."""

    def __init__(self, epoch_samples: int, *, seed: int, samples: int | None, cache: Path | None = None) -> None:
        """`samples` is the length, over as many epochs as it takes; None: one epoch. `cache`: see `epoch_order`."""
        self.epoch_samples, self._seed, self._cache = epoch_samples, seed, cache
        self._length = epoch_samples if samples is None else samples
        self._order: tuple[int, Any] | None = None
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

    def _order_of(self, epoch: int) -> Any:
        with self._lock:  # samples on other stores are read by threads
            if self._order is None or self._order[0] != epoch:
                self._order = None  # before the next is computed: one at a time in memory
                self._order = (epoch, epoch_order(self.epoch_samples, seed=self._seed, epoch=epoch, cache=self._cache))
            return self._order[1]


class NpyDataset(Epochs):
    """Samples of .npy files in their order; sample n depends on them, seq_length and the seed alone."""

    def __init__(
        self,
        files: list[NpyFile],
        *,
        seq_length: int,
        seed: int,
        vocab_size: int,
        samples: int | None = None,
        cache: Path | None = None,
    ) -> None:
        """See Epochs; ids are below `vocab_size`.

        Raises InputError if the files hold no whole sample, or `cache` cannot be written.
        """
        super().__init__(whole_samples(files, seq_length), seed=seed, samples=samples, cache=cache)
        self.files, self.seq_length = files, seq_length
        self._vocab_size = vocab_size
        self._ends = np.cumsum([file.tokens // seq_length for file in files], dtype=np.int64)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return `tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32), each [seq_length].

        Labels are the sample's own tokens shifted by one, so that the last position has none: its mask is 0.

        Raises:
            CorruptError: a file holds an id outside the vocabulary.
        """
        file, first = self.place(index)
        ids = file.read(first, self.seq_length)
        refuse_ids_read(ids, self._vocab_size, file.path, first)
        tokens = torch.from_numpy(ids.astype(np.int64))
        mask = torch.ones(self.seq_length)
        mask[-1] = 0.0
        labels = tokens.roll(-1)
        labels[-1] = 0  # any id within the vocabulary
        return {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": torch.arange(self.seq_length)}

    def place(self, index: int) -> tuple[NpyFile, int]:
        """Return the file that a sample is from, and the number of its first token there."""
        sample = self.number(index)
        number = int(np.searchsorted(self._ends, sample, side="right"))
        before = int(self._ends[number - 1]) if number else 0
        return self.files[number], (sample - before) * self.seq_length
