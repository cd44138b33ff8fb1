"""The datasets of training and validation samples of a run.

A blend is made a dataset by megatron-core's builder where all its sources are .bin and .idx pairs.

.npy files alone are a dataset of their own, without any index on disk. In a blend with others, megatron-core's
BlendedDataset draws from them and from its own datasets alike. It is imported where it is used: the configuration here
is read by processes that never build a dataset.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.data.blends import Blend, Source, parse_blend
from megatron_fanformer.data.config import DataConfig
from megatron_fanformer.data.index_cache import indices_in
from megatron_fanformer.data.npy_dataset import NpyDataset
from megatron_fanformer.data.npy_files import NpyType, open_npy_files
from megatron_fanformer.data.token_files import TokenIndex, read_index
from megatron_fanformer.errors import InputError

PART_NAMES = ("training", "validation", "test")

Bounds = tuple[float, float]
Sizes = dict[int, int | None]


TRAIN, VALIDATION = 0, 1  # positions in megatron-core's lists
SPLIT_VALIDATION = "validation"  # the name of the validation set that a split cuts off


@dataclass(frozen=True)
class Datasets:
    """What there is to train and to validate on: map-style datasets of samples."""

    train: Any
    valid: dict[str, Any]


def build_datasets(
    config: DataConfig,
    *,
    seq_length: int,
    train_samples: int,
    valid_samples: int | None,
    seed: int,
    vocab_size: int,
    eod_id: int,
) -> Datasets:
    """Build the datasets; a collective call where torch.distributed is initialised.

    `valid_samples` is the number of samples of each validation set, None for one epoch of it. A set is
    repeated, newly shuffled, as often as its number of samples asks for. With more than one epoch of .bin and
    .idx pairs, megatron-core's shuffle depends on that number: a run that is to be resumed keeps its
    `train_samples`. The order of .npy files does not.

    Raises:
        InputError: a blend that cannot be read, missing files, a set with no whole sample, a split that
            leaves a part no document, an index cache that cannot be written or is not shared by all nodes.
        CorruptError: token files that disagree with their index or their manifest.
    """
    sets = _DatasetBuilder(
        cache=config.index_cache(),
        npy_dtype=config.npy_dtype,
        seq_length=seq_length,
        seed=seed,
        vocab_size=vocab_size,
        eod_id=eod_id,
    )
    train = parse_blend(config.train_data)
    if config.split is not None and not config.valid_data:
        _refuse_npy(train)
        parts = sets.of_split(train, {TRAIN: train_samples, VALIDATION: valid_samples}, config.split)
        return Datasets(parts[TRAIN], {SPLIT_VALIDATION: parts[VALIDATION]})
    valid = {
        name: sets.of_blend(parse_blend(items), VALIDATION, valid_samples) for name, items in config.valid_data.items()
    }
    return Datasets(sets.of_blend(train, TRAIN, train_samples), valid)


def _refuse_npy(blend: Blend) -> None:
    if any(source.is_npy for source in blend.sources):
        raise InputError("data.split cuts by documents, and .npy files do not tell them apart: use data.valid_data")


@dataclass(frozen=True)
class _TokenIds:
    """All that GPTDataset asks of a tokenizer; `unique_identifiers` goes into the names of cached indices."""

    eod: int
    vocab_size: int
    unique_identifiers: dict[str, Any]


@dataclass(frozen=True)
class OneOfBlend:
    """A source of a mixed blend, in the one form that BlendedDataset asks of all of them."""

    samples: Any
    index_split: Any

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """The blend's index depends on its weights and its length alone."""
        return {"class": type(self.samples).__name__}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item: dict[str, Any] = self.samples[index]
        return item


class _DatasetBuilder:
    """Builds datasets in one cache, of one sequence length and seed, after what megatron-core takes for granted."""

    def __init__(
        self, *, cache: Path, npy_dtype: NpyType, seq_length: int, seed: int, vocab_size: int, eod_id: int
    ) -> None:
        self._cache = cache
        self._npy_dtype = npy_dtype
        self._seq_length = seq_length
        self._seed = seed
        self._vocab_size = vocab_size
        self._eod_id = eod_id
        self._indices: dict[str, TokenIndex] = {}

    def of_blend(self, blend: Blend, part: int, size: int | None) -> Any:
        """The dataset of all documents of a blend, of at least `size` samples (None: one epoch), as one of the parts.

        Raises InputError and CorruptError as `build_datasets`.
        """
        if not any(source.is_npy for source in blend.sources):
            return self._of_pairs(blend, {part: size}, None)[part]
        if len(blend.sources) == 1:
            return self._of_npy(blend.sources[0], size)
        return self._of_both(blend, part, size)

    def of_split(self, blend: Blend, sizes: Sizes, split: str) -> list[Any]:
        """The datasets of pairs by part, of `sizes` samples each (None: one epoch; a part left out: none)."""
        return self._of_pairs(blend, sizes, split)

    # -- .npy files

    def _of_npy(self, source: Source, size: int | None) -> NpyDataset:
        files = open_npy_files(source.paths, self._npy_dtype)
        return NpyDataset(files, seq_length=self._seq_length, seed=self._seed, samples=size)

    def _of_both(self, blend: Blend, part: int, size: int | None) -> Any:
        """Without weights, sources count by their samples."""
        from megatron.core.datasets.blended_dataset import BlendedDataset
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

        epochs = [self._epoch_of(source) for source in blend.sources]
        total = int(sum(epochs)) if size is None else size
        weights = np.array(blend.weights or epochs) / sum(blend.weights or epochs)
        # The blend takes next the source that is furthest behind its share, so never more than one beyond it.
        shares = [int(weight * total) + 1 for weight in weights]
        datasets = [self._one(source, part, share) for source, share in zip(blend.sources, shares, strict=True)]
        identity = {"weights": weights.tolist(), "size": total, "part": part}
        with indices_in(self._cache, identity) as folder:
            config = self._config(folder, blend.sources, None, part, None)
            return BlendedMegatronDatasetBuilder.build_generic_dataset(
                BlendedDataset, lambda: True, True, datasets, weights.tolist(), total, config
            )

    def _epoch_of(self, source: Source) -> float:
        """The samples of an epoch; of a source too short for one, which is repeated, the part that it fills."""
        if source.is_npy:
            return sum(file.tokens // self._seq_length for file in open_npy_files(source.paths, self._npy_dtype))
        tokens = self._index(source).tokens
        return (tokens - 1) // self._seq_length or tokens / self._seq_length

    def _one(self, source: Source, part: int, size: int) -> OneOfBlend:
        from megatron.core.datasets.utils import Split

        return OneOfBlend(self.of_blend(Blend([source], None), part, size), Split(part))

    # -- .bin and .idx pairs

    def _of_pairs(self, blend: Blend, sizes: Sizes, split: str | None) -> list[Any]:
        """Without a split, the one part of `sizes` is made of all documents."""
        from megatron.core import __version__
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset

        bounds = _split_bounds(split) if split is not None else dict.fromkeys(sizes, (0.0, 1.0))
        tokens = {part: self._tokens_of(blend, part, span) for part, span in bounds.items()}
        weights = self._weights(blend, [(tokens[part], size) for part, size in sizes.items()])
        requested: list[int | None] = [0] * len(PART_NAMES)
        for part, size in sizes.items():
            epoch = self._samples(tokens[part]) if size is None else size
            # Where there are weights, megatron-core wants a number.
            requested[part] = epoch if weights is not None else size
        identity = {
            "megatron": __version__,
            "documents": self._identities(blend.sources),
            "weights": weights,
            "requested": requested,
            "split": split,
            "seq_length": self._seq_length,
            "seed": self._seed,
        }
        with indices_in(self._cache, identity) as folder:
            config = self._config(folder, blend.sources, weights, min(sizes), split)
            return list(BlendedMegatronDatasetBuilder(GPTDataset, requested, lambda: True, config).build())

    def _index(self, source: Source) -> TokenIndex:
        prefix = source.paths[0]
        if prefix not in self._indices:
            self._indices[prefix] = read_index(prefix)
        return self._indices[prefix]

    def _identities(self, sources: Sequence[Source]) -> list[str]:
        return [self._index(source).identity for source in sources if not source.is_npy]

    def _tokens_of(self, blend: Blend, part: int, bounds: Bounds) -> list[int]:
        """The tokens of each prefix between two fractions of its documents, as megatron-core cuts them."""
        tokens = []
        for source in blend.sources:
            lengths = self._index(source).lengths
            begin, end = (round(bound * len(lengths)) for bound in bounds)
            tokens.append(int(lengths[begin:end].sum(dtype=np.int64)))
            if not tokens[-1]:
                raise InputError(
                    f"{source.paths[0]} has {len(lengths)} documents, of which none is left for {PART_NAMES[part]}:"
                    " give more data, another data.split, or validation files of their own"
                )
        return tokens

    def _samples(self, tokens: list[int]) -> int:
        """The whole samples in one epoch: each is seq_length tokens, and one more as its last label."""
        samples = sum((count - 1) // self._seq_length for count in tokens)
        if not samples:
            raise InputError(
                f"{sum(tokens)} tokens are no whole sample of {self._seq_length} and its last label:"
                " give more data, or lower model.seq_length"
            )
        return samples

    def _weights(self, blend: Blend, parts: list[tuple[list[int], int | None]]) -> list[float] | None:
        """The weights for megatron-core.

        Of several files without weights it makes one epoch and ends. Where that does not suffice, or where a
        file is too short for a sample of its own, the files' sizes are the weights, which lets them repeat.
        """
        if len(blend.sources) == 1 or blend.weights is not None:
            return blend.weights if len(blend.sources) > 1 else None
        for tokens, size in parts:
            if min(tokens) <= self._seq_length or (size is not None and size > self._samples(tokens)):
                return [float(self._index(source).tokens) for source in blend.sources]
        return None

    def _config(
        self, folder: Path, sources: Sequence[Source], weights: list[float] | None, part: int, split: str | None
    ) -> Any:
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

        blend = ([source.paths[0] for source in sources], weights)
        per_split = [blend if position == part else None for position in range(len(PART_NAMES))]
        return GPTDatasetConfig(
            random_seed=self._seed,
            sequence_length=self._seq_length,
            path_to_cache=str(folder),
            blend=blend if split is not None else None,
            blend_per_split=per_split if split is None else None,
            split=split,
            tokenizer=_TokenIds(self._eod_id, self._vocab_size, {"documents": self._identities(sources)}),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )


def _split_bounds(split: str) -> dict[int, Bounds]:
    """The parts that a split has, and between which fractions of the documents each lies."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    return {part: bounds for part, bounds in enumerate(matrix) if bounds is not None}
