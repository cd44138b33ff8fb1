"""The samples of a run in stages: drawn from the mix of each stage, every source going on from its own place."""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.data.npy_dataset import Epochs
from megatron_fanformer.data.stages import with_ends

COUNTED_ENTRIES = 1 << 22  # of an index, at a time


class PairEpochs(Epochs):
    """The samples of a pair's first epoch, over and over: as megatron-core orders them, then shuffled anew.

    megatron-core shuffles all epochs of a pair together, in an order that depends on how many there will be. Here a
    sample's place does not, so that a later stage may be added or changed.
    """

    def __init__(self, samples: Any, *, seed: int, cache: Path, length: int) -> None:
        """`samples` is megatron-core's dataset of one epoch; see Epochs."""
        super().__init__(len(samples), seed=seed, samples=length, cache=cache)
        self.samples = samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        item: dict[str, Any] = self.samples[self.number(index)]
        return item

    def _order_of(self, epoch: int) -> Any:
        return super()._order_of(epoch) if epoch else range(self.epoch_samples)


@dataclass(frozen=True)
class MixOrder:
    """The order in which a mix draws from its sources, by their numbers in it."""

    sources: Any
    """[samples] the source of each sample; None where there is only one."""
    numbers: Any
    """[samples] how many samples of that source the mix has drawn before; None as above."""

    def place(self, sample: int) -> tuple[int, int]:
        """Return source and number of a sample."""
        return (0, sample) if self.sources is None else (int(self.sources[sample]), int(self.numbers[sample]))

    def counts(self, first: int, end: int, sources: int) -> np.ndarray:
        """Return [sources] int64: how many samples from `first` up to `end` each source has."""
        if self.sources is None:
            return np.array([end - first], np.int64)
        counts = np.zeros(sources, np.int64)
        for begin in range(first, end, COUNTED_ENTRIES):
            counts += np.bincount(self.sources[begin : min(end, begin + COUNTED_ENTRIES)], minlength=sources)
        return counts


@dataclass(frozen=True)
class StageOrder:
    """The order of a stage's samples."""

    first_sample: int
    """The run's sample that it begins with, from 0."""
    sources: Sequence[int]
    """The numbers of the mix's sources among those of the run."""
    drawn_before: Sequence[int]
    """For each of them, the samples that earlier stages have drawn."""
    mix: MixOrder

    def place(self, sample: int) -> tuple[int, int]:
        """Return the run's source of a sample of the run, and its number there."""
        source, number = self.mix.place(sample - self.first_sample)
        return self.sources[source], self.drawn_before[source] + number


class StagedDataset:
    """All samples of a run in stages, a map-style dataset.

    Args:
        datasets: the samples of each source, at least as many as the stages draw from it.
        stages: in their order.
        samples: of the whole run.
    """

    def __init__(self, datasets: Sequence[Any], stages: Sequence[StageOrder], *, samples: int) -> None:
        self.datasets, self.stages, self._samples = datasets, stages, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a sample of its source, as that has it."""
        source, number = self.place(index)
        item: dict[str, Any] = self.datasets[source][number]
        return item

    def place(self, index: int) -> tuple[int, int]:
        """Return the source of a sample, and its number among all that the run draws from that source."""
        if not 0 <= index < self._samples:
            raise IndexError(index)
        stage = bisect.bisect_right(self.stages, index, key=lambda stage: stage.first_sample) - 1
        return self.stages[stage].place(int(index))


def unwrapped(dataset: Any) -> Any:
    """Return the dataset whose samples another one changes, but not their order; any other as it is."""
    while hasattr(dataset, "samples") and not isinstance(dataset, PairEpochs):
        dataset = dataset.samples
    return dataset


def source_counts(dataset: Any, first: int, end: int, sources: int) -> np.ndarray:
    """Return [sources] int64: how many of a training set's samples from `first` up to `end` each source has."""
    dataset = unwrapped(dataset)
    if isinstance(dataset, StagedDataset):
        counts = np.zeros(sources, np.int64)
        for stage, begin, stop in _parts(dataset, first, end):
            counts[list(stage.sources)] += stage.mix.counts(begin, stop, len(stage.sources))
        return counts
    is_blend = hasattr(dataset, "dataset_index")
    return MixOrder(dataset.dataset_index if is_blend else None, None).counts(first, end, sources)


def _parts(dataset: StagedDataset, first: int, end: int) -> Iterator[tuple[StageOrder, int, int]]:
    """Yield each stage that has some of these samples, and from where to where they are in it."""
    for stage, own_end in with_ends(dataset.stages, len(dataset)):
        begin, stop = max(first, stage.first_sample), min(end, own_end)
        if begin < stop:
            yield stage, begin - stage.first_sample, stop - stage.first_sample
