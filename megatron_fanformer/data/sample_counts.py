"""Counts of the samples that a run draws from each of its sources, from a survey of them.

Everything here is arithmetic: missing data are reported before a rank starts, and all ranks request the same.
"""

from collections.abc import Sequence

import numpy as np

from megatron_fanformer.data.blends import PART_NAMES, Blend, Source
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.npy_files import whole_samples
from megatron_fanformer.data.survey import DataSurvey
from megatron_fanformer.errors import InputError

TRAIN, VALIDATION = 0, 1  # positions in PART_NAMES, and in megatron-core's lists

MID_LEVEL_SURPLUS = 0.005  # by which megatron-core requests more of each source of a blend than its share

Sizes = dict[int, int | None]
"""Samples by part; None: one epoch."""


class SampleCounts:
    """The counts of samples of one sequence length, from the files of a survey."""

    def __init__(self, survey: DataSurvey, seq_length: int) -> None:
        self._survey, self._seq_length = survey, seq_length

    def check(self, config: DataConfig, *, train_samples: int, valid_samples: int | None) -> None:
        """Check what a run requests against what there is.

        Raises:
            InputError: a set with no whole sample, a split that leaves a part without documents, or one of .npy files.
        """
        if config.applied_split is not None:
            refuse_npy(self._survey.train)
            self.of_pairs(self._survey.train, {TRAIN: train_samples, VALIDATION: valid_samples}, is_split=True)
            return
        self._check_blend(self._survey.train, TRAIN, train_samples)
        for blend in self._survey.valid.values():
            self._check_blend(blend, VALIDATION, valid_samples)

    def _check_blend(self, blend: Blend, part: int, size: int | None) -> None:
        if not any(source.is_npy for source in blend.sources):
            self.of_pairs(blend, {part: size}, is_split=False)
        elif len(blend.sources) > 1:
            *_, shares = self.of_mixed(blend, size)
            for source, share in zip(blend.sources, shares, strict=True):
                self._check_blend(Blend([source], None), part, share)
        else:
            whole_samples(self._survey.files(blend.sources[0]), self._seq_length)

    def repeats_pairs(self, config: DataConfig, *, train_samples: int, valid_samples: int | None) -> bool:
        """Return whether training may read a pair more than once: its order then depends on the number of samples.

        megatron-core shuffles all epochs of a pair together. (Those of .npy files are shuffled one by one.) In doubt,
        within a hundredth of an epoch, it is true.
        """
        blend, is_split = self._survey.train, config.applied_split is not None
        if all(source.is_npy for source in blend.sources):
            return False
        if any(source.is_npy for source in blend.sources):
            weights: list[float] | None = self.of_mixed(blend, train_samples)[0]
        else:
            sizes = {TRAIN: train_samples, **({VALIDATION: valid_samples} if is_split else {})}
            weights, _ = self.of_pairs(blend, sizes, is_split=is_split)
        if weights is None and len(blend.sources) > 1:
            return False  # one epoch of each suffices
        shares = np.array(weights or [1.0]) / sum(weights or [1.0]) * train_samples
        tokens: Sequence[int | None] = (
            self._tokens_of(blend, TRAIN, is_split)
            if is_split
            else [None if source.is_npy else self._survey.pair(source).tokens for source in blend.sources]
        )
        surplus = (MID_LEVEL_SURPLUS, 3) if len(shares) > 1 else (0, 0)  # it rounds up twice
        return any(
            share * (1 + surplus[0]) + surplus[1] > (own - 1) // self._seq_length
            for share, own in zip(shares, tokens, strict=True)
            if own is not None
        )

    def epoch_of(self, source: Source) -> float:
        """Return the samples of an epoch; for a source too short for one, which is repeated, the fraction that it
        fills.
        """
        if source.is_npy:
            return sum(file.tokens // self._seq_length for file in self._survey.files(source))
        tokens = self._survey.pair(source).tokens
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

    def of_pairs(self, blend: Blend, sizes: Sizes, *, is_split: bool) -> tuple[list[float] | None, list[int | None]]:
        """Return weights and samples by part, as megatron-core's builder takes them, for `sizes` of pairs.

        Without a split, the one part of `sizes` is made of all documents.
        Raises InputError for a part without documents, or without a whole sample.
        """
        parts = list(sizes)
        if is_split:
            of_first = self._survey.pair(blend.sources[0]).part_tokens
            parts = [part for part in range(len(PART_NAMES)) if part in of_first]
        tokens = {part: self._tokens_of(blend, part, is_split) for part in parts}
        weights = self._weights(blend, [(tokens[part], size) for part, size in sizes.items()])
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
            facts = self._survey.pair(source)
            tokens.append(facts.part_tokens[part] if is_split else facts.tokens)
            if not tokens[-1]:
                raise InputError(
                    f"{source.paths[0]} has {facts.sequences} documents, none is left for {PART_NAMES[part]};"
                    " use more data, another data.split, or separate validation files"
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
        too short for a sample of its own, the files' sizes are the weights, which lets them repeat.
        """
        if len(blend.sources) == 1 or blend.weights is not None:
            return blend.weights if len(blend.sources) > 1 else None
        for tokens, size in parts:
            if min(tokens) <= self._seq_length or (size is not None and size > self._samples(tokens)):
                return [float(self._survey.pair(source).tokens) for source in blend.sources]
        return None


def refuse_npy(blend: Blend) -> None:
    """Raise InputError if a blend that is to be split has .npy files."""
    if any(source.is_npy for source in blend.sources):
        raise InputError("data.split cuts by documents, and .npy files do not mark them; use data.valid_data")
