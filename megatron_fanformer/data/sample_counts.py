"""Counts of the samples that a run draws from each of its sources.

Everything here is arithmetic: missing data are reported before a rank starts, and all ranks request the same.
"""

import logging
from collections.abc import Sequence

import numpy as np

from megatron_fanformer.data.blends import PART_NAMES, TRAIN, VALIDATION, Blend, Source
from megatron_fanformer.data.check import CheckedData
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.mixes import FIRST_MIX, Mix, with_ends
from megatron_fanformer.data.token_files import whole_samples
from megatron_fanformer.errors import InputError, redacted
from megatron_fanformer.terminal import plural

logger = logging.getLogger(__name__)

EPOCHS_AS_GOOD_AS_NEW = 4  # Muennighoff et al., "Scaling Data-Constrained Language Models" (2023)
MID_LEVEL_SURPLUS = 0.005  # by which megatron-core requests more of each source of a blend than its share

Sizes = dict[int, int | None]
"""Samples by part; None: one epoch."""


class SampleCounts:
    """The counts of samples of one sequence length."""

    def __init__(self, data: CheckedData, seq_length: int) -> None:
        self._data, self._seq_length = data, seq_length

    def check(
        self, config: DataConfig, *, train_samples: int, valid_samples: int | None, mixes: Sequence[Mix] = ()
    ) -> None:
        """Check that the data suffice for a run, which has one mix where `mixes` are none.

        Raises:
            InputError: a set with no whole sample, a split that leaves a part without documents.
        """
        train = self._data.train
        if config.applied_split is not None:
            for sizes in self.built_together(train, {TRAIN: train_samples, VALIDATION: valid_samples}):
                self.of_pairs(train, sizes, is_split=True)
        elif len(mixes) > 1:
            for mix in mixes:
                self.of_mix(mix.blend)
        else:
            self._check_blend(train, TRAIN, train_samples)
        for blend in self._data.valid.values():
            self._check_blend(blend, VALIDATION, valid_samples)
        epochs = self.epochs_taken(config, mixes or [Mix(FIRST_MIX, 1, 0, train)], train_samples)
        most, source = max((epochs[source], self._name(source)) for source in epochs)
        if most > EPOCHS_AS_GOOD_AS_NEW:
            logger.warning("the run reads %s %.3g times; give it more data, or a lower weight", source, most)

    def epochs_taken(self, config: DataConfig, mixes: Sequence[Mix], train_samples: int) -> dict[Source, float]:
        """Return how many epochs of each source a run takes; less than 1 where it does not come to the end of it."""
        taken: dict[Source, float] = {}
        for mix, end in with_ends(mixes, train_samples):
            epochs = self.epoch_samples(config, mix.blend)
            weights = np.array(mix.blend.weights or epochs) / sum(mix.blend.weights or epochs)
            for source, weight, epoch in zip(mix.blend.sources, weights, epochs, strict=True):
                taken[source] = taken.get(source, 0.0) + float(weight * (end - mix.first_sample) / epoch)
        return taken

    def epoch_samples(self, config: DataConfig, blend: Blend) -> list[float]:
        """Return the samples of an epoch of each source of a training mix: of a split, those of its training part."""
        if config.applied_split is None:
            return [self.epoch_of(source) for source in blend.sources]
        return [tokens / self._seq_length for tokens in self._tokens_of(blend, TRAIN, is_split=True)]

    def _check_blend(self, blend: Blend, part: int, size: int | None) -> None:
        if not any(source.is_npy for source in blend.sources):
            self.of_pairs(blend, {part: size}, is_split=False)
        elif len(blend.sources) > 1:
            *_, shares = self.of_mixed(blend, size)
            for source, share in zip(blend.sources, shares, strict=True):
                self._check_blend(Blend([source], None), part, share)
        else:
            whole_samples(self._data.files(blend.sources[0]), self._seq_length)

    def repeats_pairs(self, config: DataConfig, *, train_samples: int) -> bool:
        """Return whether training may read a pair more than once: its order then depends on the number of samples.

        megatron-core shuffles all epochs of a pair together. (Those of .npy files are shuffled one by one.) In doubt,
        within a hundredth of an epoch, it is true.
        """
        blend, is_split = self._data.train, config.applied_split is not None
        if all(source.is_npy for source in blend.sources):
            return False
        if any(source.is_npy for source in blend.sources):
            weights: list[float] | None = self.of_mixed(blend, train_samples)[0]
        else:
            weights, _ = self.of_pairs(blend, {TRAIN: train_samples}, is_split=is_split)
        if weights is None and len(blend.sources) > 1:
            return False  # one epoch of each suffices
        shares = np.array(weights or [1.0]) / sum(weights or [1.0]) * train_samples
        tokens: Sequence[int | None] = (
            self._tokens_of(blend, TRAIN, is_split)
            if is_split
            else [None if source.is_npy else self._data.pair(source).tokens for source in blend.sources]
        )
        surplus = (MID_LEVEL_SURPLUS, 3) if len(shares) > 1 else (0, 0)  # it rounds up twice
        return any(
            share * (1 + surplus[0]) + surplus[1] > (source_tokens - 1) // self._seq_length
            for share, source_tokens in zip(shares, tokens, strict=True)
            if source_tokens is not None
        )

    def _name(self, source: Source) -> str:
        return redacted(source.name)

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
                    f"{self._name(source)} holds no whole sample of {self._seq_length} tokens, as every source of a "
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
        """Return weights and samples by part, as megatron-core's builder takes them, for `sizes` of pairs.

        Without a split, the one part of `sizes` is made of all documents.
        Raises InputError for a part without documents, or without a whole sample.
        """
        parts = list(sizes)
        if is_split:
            of_first = self._data.pair(blend.sources[0]).part_tokens
            parts = [part for part in range(len(PART_NAMES)) if part in of_first]
        tokens = {part: self._tokens_of(blend, part, is_split) for part in parts}
        looked_at = (TRAIN, VALIDATION) if is_split else sizes
        weights = self._weights(blend, [(tokens[part], sizes.get(part)) for part in looked_at])
        requested: list[int | None] = [0] * len(PART_NAMES)
        for part, size in sizes.items():
            epoch = self._samples(tokens[part]) if size is None else size
            # With weights, megatron-core requires a number.
            requested[part] = epoch if weights is not None else size
        return weights, requested

    def _tokens_of(self, blend: Blend, part: int, is_split: bool) -> list[int]:
        """Return the tokens of each prefix in a part of a split, or in all of it."""
        tokens = []
        for source in blend.sources:
            facts = self._data.pair(source)
            tokens.append(facts.part_tokens[part] if is_split else facts.tokens)
            if not tokens[-1]:
                raise InputError(
                    f"{source.paths[0]} has {plural(facts.sequences, 'document')}, none is left for {PART_NAMES[part]};"
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

    def _weights(self, blend: Blend, parts: list[tuple[list[int], int | None]]) -> list[float] | None:
        """Return the weights for megatron-core.

        For several files without weights it builds one epoch and stops. If that is not enough, or if a file is
        too short for a sample of its own (in either part of a split), the files' sizes are the weights, which lets them
        repeat.
        """
        if len(blend.sources) == 1:
            return None
        if blend.weights is not None:
            return blend.weights
        for tokens, size in parts:
            if min(tokens) <= self._seq_length or (size is not None and size > self._samples(tokens)):
                return [float(self._data.pair(source).tokens) for source in blend.sources]
        return None
