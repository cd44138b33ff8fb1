"""Mixes of a run: from a step or a token on, its samples come from other sources, or by other weights (`data.stages`).

Each source goes on from its own place: samples that one mix has drawn of it are not drawn again before its epoch ends.
"""

import bisect
import functools
import os.path
import re
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_fanformer.data.blends import Blend, Source, Word, blend_problems, parse_blend
from megatron_fanformer.data.sample_order import Epochs
from megatron_fanformer.errors import InputError, collect_problems, redacted
from megatron_fanformer.options import count

START = re.compile(r"from (?P<unit>step|token) (?P<number>\S+)")
FIRST_MIX = "train_data"
COUNTED_ENTRIES = 1 << 22  # of an index, at a time


@dataclass(frozen=True)
class Mix:
    """A part of a run whose samples come from one blend."""

    name: str
    """FIRST_MIX, or as `data.stages` has it."""
    first_step: int
    """The step that it begins with, from 1."""
    first_sample: int
    """The sample that it begins with, from 0."""
    blend: Blend


def first_step(name: str, *, batch_tokens: int) -> int:
    """Return the step that a mix begins with: the one it names, or the first after as many tokens as it names.

    `batch_tokens` are those of a step's samples. Raises InputError for a name that names neither.
    """
    problem = f"data.stages: {name!r} does not say where the stage begins"
    if (start := START.fullmatch(name)) is None:
        raise InputError(f"{problem}; write it as 'from step 9001' or 'from token 3.9T'")
    try:
        number = count(start["number"])
    except ArgumentTypeError as error:
        raise InputError(f"{problem}: {error}") from None
    return number if start["unit"] == "step" else -(-number // batch_tokens) + 1


def ordered(first: Blend, later: Mapping[str, Blend], *, global_batch_size: int, seq_length: int) -> list[Mix]:
    """Return the mixes of a run, of `data.train_data` and of `data.stages` by their names, in their order."""
    steps = {name: first_step(name, batch_tokens=global_batch_size * seq_length) for name in later}
    mixes = [Mix(name, step, (step - 1) * global_batch_size, later[name]) for name, step in steps.items()]
    return [Mix(FIRST_MIX, 1, 0, first), *sorted(mixes, key=lambda mix: mix.first_step)]


def with_ends(mixes: Sequence[Any], samples: int) -> list[tuple[Any, int]]:
    """Return each mix, or its order, with the sample that it ends before, of a run of so many."""
    return list(zip(mixes, [*(mix.first_sample for mix in mixes[1:]), samples], strict=True))


# -- problems of a configuration


def mix_problems(mixes: Mapping[str, Sequence[Word]]) -> list[str]:
    """List the problems of the names and blends of `data.stages`; token files are not opened."""
    problems: list[str] = []
    for name, items in mixes.items():
        collect_problems(problems, functools.partial(first_step, name, batch_tokens=1))
        problems += blend_problems(f"data.stages.{name}", items)
    return problems


def overlap_problems(blends: Sequence[Sequence[Word]]) -> list[str]:
    """Return a line for the first file that two sources of a run share: neither could go on where the other is."""
    owners: dict[str, Source] = {}
    for items in blends:
        sources = parse_blend(items).sources
        if len(set(sources)) < len(sources):
            (twice, _), *_ = Counter(sources).most_common()
            return [f"data.stages: a mix names {twice.name} twice; give it one weight"]
        for source in sources:
            for file in (*map(os.path.realpath, source.files), *source.urls):
                if (owner := owners.setdefault(file, source)) != source:
                    return [
                        f"data.stages: {redacted(file)} is in two sources, {owner.name} and {source.name}, so that no "
                        "stage could go on where the other was; name the same files as one source, in the same words, "
                        "in all stages (files without weights are one)"
                    ]
    return []


def step_problems(names: Sequence[str], *, train_iters: int, batch_tokens: int) -> list[str]:
    """List the mixes that begin with the first step or at once with another, or after the last step."""
    problems = []
    begins: dict[int, str] = {1: "data.train_data"}
    for name in names:
        step = first_step(name, batch_tokens=batch_tokens)
        if (other := begins.setdefault(step, name)) != name:
            problems.append(f"data.stages: {name!r} begins with step {step:,}, as {other} does; leave one out")
        elif step > train_iters:
            problems.append(
                f"data.stages: {name!r} begins with step {step:,}, after the last of {train_iters:,}; "
                "leave it out, or raise training.train_iters"
            )
    return problems


# -- samples


class PairEpochs(Epochs):
    """The samples of a pair's first epoch, over and over: as megatron-core orders them, then shuffled anew.

    megatron-core shuffles all epochs of a pair together, in an order that depends on how many there will be. Here a
    sample's place does not, so that a later mix may be added or changed.
    """

    def __init__(self, samples: Any, *, seed: int, length: int) -> None:
        """`samples` is megatron-core's dataset of one epoch; see Epochs."""
        super().__init__(len(samples), seed=seed, samples=length)
        self.samples = samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        item: dict[str, Any] = self.samples[self.number(index)]
        return item

    def _order_of(self, epoch: int) -> Any:
        return super()._order_of(epoch) if epoch else range(self.epoch_samples)


@dataclass(frozen=True)
class MixOrder:
    """The order of a mix's samples."""

    first_sample: int
    """The run's sample that it begins with, from 0."""
    sources: Sequence[int]
    """The numbers of the mix's sources among those of the run."""
    drawn_before: Sequence[int]
    """For each of them, the samples that earlier mixes have drawn."""
    source_index: Any
    """[samples] the source of each sample, by its number in the mix; None where there is only one."""
    sample_index: Any
    """[samples] how many samples of that source the mix has drawn before; None as above."""

    def place(self, sample: int) -> tuple[int, int]:
        """Return the run's source of one of the mix's samples, and its number among all that the run draws of it."""
        source, number = 0, sample
        if self.source_index is not None:
            source, number = int(self.source_index[sample]), int(self.sample_index[sample])
        return self.sources[source], self.drawn_before[source] + number


def draw_counts(source_index: Any, first: int, end: int, sources: int) -> np.ndarray:
    """Return [sources] int64: how many samples of an index, from `first` up to `end`, each source has."""
    if source_index is None:
        return np.array([end - first], np.int64)
    counts = np.zeros(sources, np.int64)
    for begin in range(first, end, COUNTED_ENTRIES):
        counts += np.bincount(source_index[begin : min(end, begin + COUNTED_ENTRIES)], minlength=sources)
    return counts


class MixDataset:
    """All training samples of a run of several mixes, a map-style dataset.

    `datasets` are the samples of each source, at least as many as the mixes draw from it.
    """

    def __init__(self, datasets: Sequence[Any], mixes: Sequence[MixOrder], *, samples: int) -> None:
        self.datasets, self.mixes, self._samples = datasets, mixes, samples

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
        mix = self.mixes[bisect.bisect_right(self.mixes, index, key=lambda mix: mix.first_sample) - 1]
        return mix.place(int(index) - mix.first_sample)

    def source_counts(self, first: int, end: int, sources: int) -> np.ndarray:
        """Return [sources] int64: how many of the samples from `first` up to `end` each source has."""
        counts = np.zeros(sources, np.int64)
        for mix, mix_end in with_ends(self.mixes, self._samples):
            begin, stop = max(first, mix.first_sample) - mix.first_sample, min(end, mix_end) - mix.first_sample
            if begin < stop:
                counts[list(mix.sources)] += draw_counts(mix.source_index, begin, stop, len(mix.sources))
        return counts


def unwrapped(dataset: Any) -> Any:
    """Return the dataset whose samples another one changes, but not their order; any other as it is."""
    while hasattr(dataset, "samples") and not isinstance(dataset, PairEpochs):
        dataset = dataset.samples
    return dataset


def source_counts(dataset: Any, first: int, end: int, sources: int) -> np.ndarray:
    """Return [sources] int64: how many of a training set's samples from `first` up to `end` each source has."""
    dataset = unwrapped(dataset)
    if isinstance(dataset, MixDataset):
        return dataset.source_counts(first, end, sources)
    return draw_counts(getattr(dataset, "dataset_index", None), first, end, sources)
