"""Mixes of a run: from a given step or token on, samples come from other sources or by other weights (`data.stages`).

A mix goes on with each source where earlier mixes stopped, so no sample is drawn twice before the source's epoch ends.
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
from megatron_fanformer.data.sample_order import Epochs, SampleWrapper
from megatron_fanformer.errors import InputError, collect_problems, redacted
from megatron_fanformer.options import count

START = re.compile(r"from (?P<unit>step|token) (?P<number>\S+)")
FIRST_MIX = "train_data"
COUNTED_ENTRIES = 1 << 22  # of an index, counted at a time


@dataclass(frozen=True)
class Mix:
    """A part of a run whose samples come from one blend."""

    name: str
    """FIRST_MIX, or a name in `data.stages`."""
    first_step: int
    """Its first step, counted from 1."""
    first_sample: int
    """Its first sample, counted from 0."""
    blend: Blend


def first_step(name: str, *, batch_tokens: int) -> int:
    """Return the first step of a mix: N for "from step N"; the first step after N tokens for "from token N".

    `batch_tokens` is the number of tokens in a step. Raises InputError if the name of the mix has neither form.
    """
    problem = f"data.stages: {name!r} does not say where the stage begins"
    if (start := START.fullmatch(name)) is None:
        raise InputError(f"{problem}; write it as 'from step 9001' or 'from token 3.9T'")
    try:
        number = count(start["number"])
    except ArgumentTypeError as error:
        raise InputError(f"{problem}: {error}") from None
    return number if start["unit"] == "step" else -(-number // batch_tokens) + 1  # division rounded up


def order_mixes(first: Blend, later: Mapping[str, Blend], *, global_batch_size: int, seq_length: int) -> list[Mix]:
    """Return the mixes by step: `first`, then `later` (of `data.stages`), whose names say where they begin."""
    steps = {name: first_step(name, batch_tokens=global_batch_size * seq_length) for name in later}
    mixes = [Mix(name, step, (step - 1) * global_batch_size, later[name]) for name, step in steps.items()]
    return [Mix(FIRST_MIX, 1, 0, first), *sorted(mixes, key=lambda mix: mix.first_step)]


def mix_ends(mixes: Sequence[Any], samples: int) -> list[tuple[Any, int]]:
    """Return each Mix or MixOrder of a run of `samples` samples, with the number of the first sample after it."""
    return list(zip(mixes, [*(mix.first_sample for mix in mixes[1:]), samples], strict=True))


# -- problems of a configuration


def mix_problems(mixes: Mapping[str, Sequence[Word]]) -> list[str]:
    """List the problems of the names and blends of `data.stages`, without opening token files."""
    problems: list[str] = []
    for name, items in mixes.items():
        collect_problems(problems, functools.partial(first_step, name, batch_tokens=1))  # for its error alone
        problems += blend_problems(f"data.stages.{name}", items)
    return problems


def overlap_problems(blends: Sequence[Sequence[Word]]) -> list[str]:
    """List the first problem found: a mix that names a source twice, or two sources that share a file."""
    owners: dict[str, Source] = {}
    for items in blends:
        sources = parse_blend(items).sources
        if len(set(sources)) < len(sources):
            [(repeated, _)] = Counter(sources).most_common(1)
            return [f"data.stages: a mix names {repeated.name} twice; give it one weight"]
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
    """List a problem for each mix that begins with the run's first step, with another mix, or after the last step."""
    problems = []
    name_by_step: dict[int, str] = {1: "data.train_data"}  # by the first step of the mix
    for name in names:
        step = first_step(name, batch_tokens=batch_tokens)
        if (other := name_by_step.setdefault(step, name)) != name:
            problems.append(f"data.stages: {name!r} begins with step {step:,}, as {other} does; leave one out")
        elif step > train_iters:
            problems.append(
                f"data.stages: {name!r} begins with step {step:,}, after the last of {train_iters:,}; "
                "leave it out, or raise training.train_iters"
            )
    return problems


# -- samples


class PairEpochs(Epochs):
    """The samples of a pair: the first epoch in megatron-core's order, each later one in an order of its own.

    megatron-core shuffles all epochs of a pair together, in an order that depends on the number of epochs. The order
    here does not, so that a later mix may be added or changed.
    """

    def __init__(self, first_epoch: Sequence[dict[str, Any]], *, seed: int, length: int) -> None:
        """`first_epoch` is megatron-core's dataset of one epoch, `length` the number of samples over all epochs."""
        super().__init__(len(first_epoch), seed=seed, samples=length)
        self.first_epoch = first_epoch

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.first_epoch[self.number(index)]

    def _order_of(self, epoch: int) -> Any:
        return super()._order_of(epoch) if epoch else range(self.epoch_samples)  # epoch 0 is shuffled already


@dataclass(frozen=True)
class MixOrder:
    """The order of a mix's samples."""

    first_sample: int
    """The number, in the run, of the mix's first sample."""
    sources: Sequence[int]
    """The number, in the run, of each source of the mix."""
    drawn_before: Sequence[int]
    """The samples that earlier mixes have drawn from each source of the mix."""
    source_index: Any
    """[samples]: the source of each sample, as a position in `sources`; None if there is only one source."""
    sample_index: Any
    """[samples]: how many samples the mix has drawn from the same source before; None if there is only one source."""


def draw_counts(source_index: Any, first: int, end: int, sources: int) -> np.ndarray:
    """Count samples `first` up to `end` by source; return [sources] int64. `source_index` has each sample's source."""
    if source_index is None:  # there is only one source
        return np.array([end - first], np.int64)
    counts = np.zeros(sources, np.int64)
    for begin in range(first, end, COUNTED_ENTRIES):
        counts += np.bincount(source_index[begin : min(end, begin + COUNTED_ENTRIES)], minlength=sources)
    return counts


class MixDataset:
    """All training samples of a run of several mixes, a map-style dataset."""

    def __init__(
        self, datasets: Sequence[Sequence[dict[str, Any]]], mixes: Sequence[MixOrder], *, samples: int
    ) -> None:
        """`datasets` has a dataset for each source, with at least as many samples as the mixes draw from the source."""
        self.datasets, self.mixes, self._samples = datasets, mixes, samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        source, number = self.locate(index)
        return self.datasets[source][number]

    def locate(self, index: int) -> tuple[int, int]:
        """Return the source of a sample, and how many samples the run draws from that source before."""
        if not 0 <= index < self._samples:
            raise IndexError(index)
        mix = self.mixes[bisect.bisect_right(self.mixes, index, key=lambda mix: mix.first_sample) - 1]
        sample = int(index) - mix.first_sample
        if mix.source_index is None:  # there is only one source
            return mix.sources[0], mix.drawn_before[0] + sample
        position = int(mix.source_index[sample])
        return mix.sources[position], mix.drawn_before[position] + int(mix.sample_index[sample])


def unwrap(dataset: Any) -> Any:
    """Return the dataset inside any number of wrappers, which has the same samples in the same order."""
    while isinstance(dataset, SampleWrapper):
        dataset = dataset.samples
    return dataset


def source_counts(dataset: Any, first: int, end: int, sources: int) -> np.ndarray:
    """Count the samples of each source among samples `first` up to `end` of a training set; return [sources] int64."""
    dataset = unwrap(dataset)
    if not isinstance(dataset, MixDataset):  # a single source, without dataset_index, or megatron-core's blend
        return draw_counts(getattr(dataset, "dataset_index", None), first, end, sources)
    counts = np.zeros(sources, np.int64)
    for mix, mix_end in mix_ends(dataset.mixes, len(dataset)):
        begin, stop = max(first, mix.first_sample) - mix.first_sample, min(end, mix_end) - mix.first_sample
        if begin < stop:  # both are counted within the mix
            counts[list(mix.sources)] += draw_counts(mix.source_index, begin, stop, len(mix.sources))
    return counts
