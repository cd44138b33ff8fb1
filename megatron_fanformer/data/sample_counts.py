"""Counts of the samples that a run draws from each of its sources.

Everything here is arithmetic: missing data are reported before a rank starts, and all ranks request the same.
"""

from collections.abc import Sequence

import numpy as np

from megatron_fanformer.data.blends import PART_NAMES, TRAIN, VALIDATION, Blend, Source
from megatron_fanformer.data.check import CheckedData
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.mixes import Mix
from megatron_fanformer.data.token_files import whole_samples
from megatron_fanformer.errors import InputError, redacted
from megatron_fanformer.terminal import plural

# megatron-core requests more of each source of a blend than its share: half a percent, rounded up twice.
SURPLUS_FACTOR, SURPLUS_SAMPLES = 1.005, 3

Sizes = dict[int, int | None]
"""Samples by part; None: one epoch."""


class SampleCounts:
    """The counts of samples of one sequence length."""

    def __init__(self, data: CheckedData, seq_length: int) -> None:
        self._data, self._seq_length = data, seq_length

    def check(
        self, config: DataConfig, *, train_samples: int, valid_samples: int | None, mixes: Sequence[Mix] = ()
    ) -> None:
        """Raise InputError where a set has no whole sample, or a split leaves a part without documents."""
        train = self._data.train
        if config.split is not None:
            for sizes in self.built_together(train, {TRAIN: train_samples, VALIDATION: valid_samples}):
                self.of_pairs(train, sizes, is_split=True)
        elif len(mixes) > 1:
            for mix in mixes:
                self.of_mix(mix.blend)
        else:
            self._check_blend(train, TRAIN, train_samples)
        for blend in self._data.valid.values():
            self._check_blend(blend, VALIDATION, valid_samples)

    def _check_blend(self, blend: Blend, part: int, size: int | None) -> None:
        if not any(source.is_npy for source in blend.sources):
            self.of_pairs(blend, {part: size}, is_split=False)
        elif len(blend.sources) > 1:
            *_, shares = self.of_mixed(blend, size)
            for source, share in zip(blend.sources, shares, strict=True):
                self._check_blend(Blend([source], None), part, share)
        else:
            whole_samples(self._data.files(blend.sources[0]), self._seq_length)

    def epoch_samples(self, config: DataConfig, blend: Blend) -> list[float]:
        """Return the samples of an epoch of each source of a training mix: of a split, those of its training part."""
        if config.split is None:
            return [self.epoch_of(source) for source in blend.sources]
        return [self._tokens(source, TRAIN, is_split=True) / self._seq_length for source in blend.sources]

    def repeats_pairs(self, config: DataConfig, *, train_samples: int) -> bool:
        """Return whether training may read a pair more than once: its order then depends on the number of samples.

        megatron-core shuffles all epochs of a pair together. (Those of .npy files are shuffled one by one.) In doubt,
        within a hundredth of an epoch, it is true.
        """
        blend, is_split = self._data.train, config.split is not None
        if any(source.is_npy for source in blend.sources):
            weights: list[float] | None = self.of_mixed(blend, train_samples)[0]
        else:
            weights, _ = self.of_pairs(blend, {TRAIN: train_samples}, is_split=is_split)
        if weights is None and len(blend.sources) > 1:
            return False  # one epoch of each suffices
        shares = np.array(weights or [1.0]) / sum(weights or [1.0]) * train_samples
        if len(shares) > 1:
            shares = shares * SURPLUS_FACTOR + SURPLUS_SAMPLES
        return any(
            share > (self._tokens(source, TRAIN, is_split=is_split) - 1) // self._seq_length
            for source, share in zip(blend.sources, shares, strict=True)
            if not source.is_npy
        )

    def epoch_of(self, source: Source) -> float:
        """Return the samples of an epoch; for a source too short for one, the fraction of a sample that it fills."""
        if source.is_npy:
            return sum(file.tokens // self._seq_length for file in self._data.files(source))
        tokens = self._data.pair(source).tokens
        return (tokens - 1) // self._seq_length or tokens / self._seq_length

    def of_mixed(self, blend: Blend, size: int | None) -> tuple[list[float], int, list[int]]:
        """Return weights, size, and the most samples that are requested of each source, of pairs and .npy files.

        Without weights, sources count by their samples.
        """
        epochs = [self.epoch_of(source) for source in blend.sources]
        total = int(sum(epochs)) if size is None else size
        weights = np.array(blend.weights or epochs) / sum(blend.weights or epochs)
        # The blend always draws from the source furthest behind its share, so never more than one sample beyond it.
        return weights.tolist(), total, [int(weight * total) + 1 for weight in weights]

    def of_mix(self, blend: Blend) -> list[float]:
        """Return the weights of one of several mixes, as megatron-core has them where it is the only one of a run."""
        epochs = [self.epoch_of(source) for source in blend.sources]
        for source, epoch in zip(blend.sources, epochs, strict=True):
            if epoch < 1 or (not source.is_npy and self._data.pair(source).tokens <= self._seq_length):
                raise InputError(
                    f"{redacted(source.name)} holds no whole sample of {self._seq_length} tokens, as every source of a "
                    "run in stages must; join it with others, or leave it out"
                )
        if any(source.is_npy for source in blend.sources):
            return self.of_mixed(blend, None)[0]
        if blend.weights is None:
            return [float(epoch) for epoch in epochs]
        stated = np.array(blend.weights, np.float64)
        return (stated / np.sum(stated)).tolist()  # megatron-core's arithmetic: the last bits decide between equal ones

    def built_together(self, blend: Blend, sizes: Sizes) -> list[Sizes]:
        """Return which parts of a split megatron-core's builder takes together, with the same weights.

        Where validation alone takes more than an epoch, and so needs weights, training is built for itself: its order
        is not to depend on how much is validated.
        """
        weights = {part: self.of_pairs(blend, {part: size}, is_split=True)[0] for part, size in sizes.items()}
        if weights[TRAIN] is None and weights[VALIDATION] is not None:
            return [{part: size} for part, size in sizes.items()]
        return [sizes]

    def of_pairs(self, blend: Blend, sizes: Sizes, *, is_split: bool) -> tuple[list[float] | None, list[int | None]]:
        """Return weights and, by part, numbers of samples, as megatron-core's builder takes them for a blend of pairs.

        `sizes` states how many samples to build of which parts. Without a split it has one part, made of all documents.

        Without weights, megatron-core builds one epoch of several pairs and stops. If a part needs more samples, or if
        a pair is too short for one sample, the pairs are weighted by their tokens, which lets them repeat. In a split,
        both training and validation decide this, even if only one of them is built.

        Raises InputError if a part has no documents, or if one epoch is requested and holds no whole sample.
        """
        parts = self._data.pair(blend.sources[0]).part_tokens if is_split else sizes
        tokens = {part: [self._tokens(source, part, is_split=is_split) for source in blend.sources] for part in parts}
        weights = blend.weights if len(blend.sources) > 1 else None
        if len(blend.sources) > 1 and weights is None:
            deciding_parts = (TRAIN, VALIDATION) if is_split else tuple(sizes)
            if any(self._must_repeat(tokens[part], sizes.get(part)) for part in deciding_parts):
                weights = [float(self._data.pair(source).tokens) for source in blend.sources]
        requested: list[int | None] = [0] * len(PART_NAMES)
        for part, size in sizes.items():
            requested[part] = size
            if size is None:
                epoch_samples = self._samples(tokens[part])  # raises InputError if there is no whole sample
                if weights is not None:  # then megatron-core requires a number
                    requested[part] = epoch_samples
        return weights, requested

    def _must_repeat(self, tokens: list[int], size: int | None) -> bool:
        """Return whether pairs of so many tokens must repeat to make `size` samples, or one of them makes no sample."""
        has_short_pair = min(tokens) <= self._seq_length
        return has_short_pair or (size is not None and size > self._samples(tokens))

    def _tokens(self, source: Source, part: int, *, is_split: bool) -> int:
        """Return the tokens of a pair in a part of a split, or in all of it."""
        pair = self._data.pair(source)
        tokens = pair.part_tokens[part] if is_split else pair.tokens
        if not tokens:
            raise InputError(
                f"{source.paths[0]} has {plural(pair.sequences, 'document')}, none is left for {PART_NAMES[part]};"
                " a split cuts none: use more, another data.split, or separate validation files"
            )
        return tokens

    def _samples(self, tokens: list[int]) -> int:
        """Return the whole samples in one epoch: each is seq_length tokens, and one more as its last label."""
        samples = sum((count - 1) // self._seq_length for count in tokens)
        if not samples:
            raise InputError(
                f"{sum(tokens)} tokens do not make a whole sample of {self._seq_length} and its last label;"
                " use more data, or lower model.seq_length"
            )
        return samples
