"""Count the samples that a run draws from each source.

Counting opens no file: too little data is reported before a rank starts, and all ranks request the same numbers.
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

# Of each source of a blend, megatron-core requests half a percent more than the source's share, rounded up twice.
SURPLUS_FACTOR, SURPLUS_SAMPLES = 1.005, 3

Sizes = dict[int, int | None]
"""The number of samples of each part; None: one epoch."""


class SampleCounts:
    """Counts of samples of one sequence length, in the checked data of a run."""

    def __init__(self, data: CheckedData, seq_length: int) -> None:
        self._data, self._seq_length = data, seq_length

    def check(
        self, config: DataConfig, *, train_samples: int, valid_samples: int | None, mixes: Sequence[Mix] = ()
    ) -> None:
        """Raise InputError if a set is too small for one sample, or if a part of a split has no documents."""
        train = self._data.train
        if config.split is not None:
            for sizes in self.group_parts(train, {TRAIN: train_samples, VALIDATION: valid_samples}):
                self.pair_sizes(train, sizes, is_split=True)  # called for the errors that it raises, as below
        elif len(mixes) > 1:
            for mix in mixes:
                self.mix_weights(mix.blend)
        else:
            self._check_blend(train, TRAIN, train_samples)
        for blend in self._data.valid.values():
            self._check_blend(blend, VALIDATION, valid_samples)

    def _check_blend(self, blend: Blend, part: int, size: int | None) -> None:
        """Raise InputError if one of the datasets that make up a blend is too small for one sample."""
        if not any(source.is_npy for source in blend.sources):
            self.pair_sizes(blend, {part: size}, is_split=False)  # called for the errors that it raises
        elif len(blend.sources) > 1:
            *_, shares = self.mixed_sizes(blend, size)
            for source, share in zip(blend.sources, shares, strict=True):
                self._check_blend(Blend([source], None), part, share)
        else:
            whole_samples(self._data.files(blend.sources[0]), self._seq_length)

    def epoch_samples(self, config: DataConfig, blend: Blend) -> list[float]:
        """Return how many samples an epoch of each source of a training mix has; with a split, of the training part."""
        if config.split is None:
            return [self.source_epoch_samples(source) for source in blend.sources]
        return [self._tokens(source, TRAIN, is_split=True) / self._seq_length for source in blend.sources]

    def repeats_pairs(self, config: DataConfig, *, train_samples: int) -> bool:
        """Return whether training may read a pair more than once: then the order of samples depends on their number.

        The reason is that megatron-core shuffles all epochs of a pair together. Epochs of .npy files are shuffled one
        by one. In doubt, that is, within a hundredth of an epoch, the answer is True.
        """
        blend, is_split = self._data.train, config.split is not None
        if any(source.is_npy for source in blend.sources):
            weights: list[float] | None = self.mixed_sizes(blend, train_samples)[0]
        else:
            weights, _ = self.pair_sizes(blend, {TRAIN: train_samples}, is_split=is_split)
        if weights is None and len(blend.sources) > 1:
            return False  # one epoch of each pair suffices
        weights = weights or [1.0]  # without weights, there is one source
        shares = np.array(weights) / sum(weights) * train_samples
        if len(shares) > 1:
            shares = shares * SURPLUS_FACTOR + SURPLUS_SAMPLES
        return any(
            share > (self._tokens(source, TRAIN, is_split=is_split) - 1) // self._seq_length  # samples of an epoch
            for source, share in zip(blend.sources, shares, strict=True)
            if not source.is_npy
        )

    def source_epoch_samples(self, source: Source) -> float:
        """Return the samples in an epoch of a source; a pair too short for a sample counts as a fraction of one."""
        if source.is_npy:
            return sum(file.tokens // self._seq_length for file in self._data.files(source))
        tokens = self._data.pair(source).tokens
        # A pair needs one token more than its samples have: the last label.
        return (tokens - 1) // self._seq_length if tokens > self._seq_length else tokens / self._seq_length

    def mixed_sizes(self, blend: Blend, size: int | None) -> tuple[list[float], int, list[int]]:
        """Return the weights and the size of a blend with .npy files, and how many samples to build of each source.

        `size` None means one epoch. Without weights, sources are weighted by the samples in their epochs.
        """
        epoch_samples = [self.source_epoch_samples(source) for source in blend.sources]
        total = int(sum(epoch_samples)) if size is None else size
        weights = np.array(blend.weights or epoch_samples) / sum(blend.weights or epoch_samples)
        # megatron-core draws from the source furthest behind its share, so at most one sample beyond a share.
        return weights.tolist(), total, [int(weight * total) + 1 for weight in weights]

    def mix_weights(self, blend: Blend) -> list[float]:
        """Return the weights that megatron-core would use for a mix. Raises InputError if a source has no sample."""
        epoch_samples = [self.source_epoch_samples(source) for source in blend.sources]
        for source, samples in zip(blend.sources, epoch_samples, strict=True):
            lacks_last_label = not source.is_npy and self._data.pair(source).tokens <= self._seq_length
            if samples < 1 or lacks_last_label:
                raise InputError(
                    f"{redacted(source.name)} holds no whole sample of {self._seq_length} tokens, as every source of a "
                    "run in stages must; join it with others, or leave it out"
                )
        if any(source.is_npy for source in blend.sources):
            return self.mixed_sizes(blend, size=None)[0]  # the weights, which do not depend on the size
        if blend.weights is None:
            return [float(samples) for samples in epoch_samples]
        stated = np.array(blend.weights, np.float64)
        # By megatron-core's arithmetic: if two sources are equally far behind their shares, the last bit decides.
        return (stated / np.sum(stated)).tolist()

    def group_parts(self, blend: Blend, sizes: Sizes) -> list[Sizes]:
        """Divide the parts of a split into groups that megatron-core's builder builds with the same weights.

        If only validation takes more than an epoch, and so needs weights, training gets a group of its own, without
        weights: the order of training samples must not depend on the amount of validation.
        """
        weights = {part: self.pair_sizes(blend, {part: size}, is_split=True)[0] for part, size in sizes.items()}
        if weights[TRAIN] is None and weights[VALIDATION] is not None:
            return [{part: size} for part, size in sizes.items()]
        return [sizes]

    def pair_sizes(self, blend: Blend, sizes: Sizes, *, is_split: bool) -> tuple[list[float] | None, list[int | None]]:
        """Return weights and, by part, numbers of samples, as megatron-core's builder takes them for a blend of pairs.

        `sizes` states how many samples to build of which parts. Without a split it has one part, made of all documents.

        Without weights, megatron-core builds one epoch of several pairs and stops. If a part needs more samples, or if
        a pair is too short for one sample, the pairs are weighted by their tokens, which lets them repeat. In a split,
        training and validation are both examined, even if only one of them is built.

        Raises InputError if a part has no documents, or if one epoch is requested and holds no whole sample.
        """
        parts = self._data.pair(blend.sources[0]).part_tokens if is_split else sizes
        tokens = {part: [self._tokens(source, part, is_split=is_split) for source in blend.sources] for part in parts}
        weights = blend.weights if len(blend.sources) > 1 else None
        if len(blend.sources) > 1 and weights is None:
            deciding_parts = (TRAIN, VALIDATION) if is_split else tuple(sizes)
            if any(self._need_weights(tokens[part], sizes.get(part)) for part in deciding_parts):
                weights = [float(self._data.pair(source).tokens) for source in blend.sources]
        requested: list[int | None] = [0] * len(PART_NAMES)
        for part, size in sizes.items():
            samples = self._samples(tokens[part]) if size is None else size  # raises if there is no sample
            requested[part] = size if weights is None else samples  # with weights, megatron-core requires a number
        return weights, requested

    def _need_weights(self, tokens: list[int], size: int | None) -> bool:
        """Return whether pairs of so many `tokens` need weights: they repeat for `size` samples, or one holds none."""
        has_short_pair = min(tokens) <= self._seq_length
        return has_short_pair or (size is not None and size > self._samples(tokens))

    def _tokens(self, source: Source, part: int, *, is_split: bool) -> int:
        """Return the number of a pair's tokens, with `is_split` those in `part` alone. Raises InputError if it is 0."""
        pair = self._data.pair(source)
        tokens = pair.part_tokens[part] if is_split else pair.tokens
        if not tokens:
            raise InputError(
                f"{source.paths[0]} has {plural(pair.sequences, 'document')}, none is left for {PART_NAMES[part]};"
                " a split cuts no document: use more, another data.split, or separate validation files"
            )
        return tokens

    def _samples(self, tokens: list[int]) -> int:
        """Return the number of samples in an epoch of pairs with so many tokens each. Raises InputError if it is 0."""
        samples = sum((count - 1) // self._seq_length for count in tokens)  # each pair needs a last label
        if not samples:
            raise InputError(
                f"{sum(tokens)} tokens do not make a whole sample of {self._seq_length} and its last label;"
                " use more data, or lower model.seq_length"
            )
        return samples
