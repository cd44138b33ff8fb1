"""Training and validation samples out of token files: megatron-core's own datasets.

megatron-core is imported where it is used, not above: the configuration here is read by processes that never
build a dataset.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.data.blends import Blend, blend_problems, parse_blend, split_problems
from megatron_fanformer.data.index_cache import building_in, fingerprint
from megatron_fanformer.data.token_files import bin_path, read_index
from megatron_fanformer.errors import InputError

TRAIN, VALIDATION = 0, 1  # positions in megatron-core's lists
PART_NAMES = ("training", "validation", "test")
SPLIT_VALIDATION = "validation"  # the name of the validation set that a split cuts off

Bounds = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the samples come from."""

    train_data: list[str] = field(default_factory=list)
    """Prefixes of token files, or Megatron's blend form: weight prefix weight prefix …"""
    valid_data: dict[str, list[str]] = field(default_factory=dict)
    """Validation sets by name, each in the form of train_data."""
    split: str | None = None
    """Where valid_data is empty: cuts train_data into parts, e.g. "99,1,0" (training, validation, test)."""
    tokenizer: str | None = None
    """The tokenizer that made the tokens: a .model, a tokenizer.json, or a folder that holds one."""
    cache_path: str | None = None
    """Folder for the sample indices, shared by all nodes; None: .index_cache beside the first train_data."""
    num_workers: int = 0
    """Loader processes a rank; 0 loads in the rank's own process."""

    def problems(self) -> list[str]:
        """Everything that is wrong with it, a line each; no token file is opened."""
        problems = blend_problems("data.train_data", self.train_data)
        for name, items in self.valid_data.items():
            problems += blend_problems(f"data.valid_data.{name}", items)
        if self.split is not None:
            if self.valid_data:
                problems.append("data.split: cannot stand beside data.valid_data; remove one of the two")
            problems += split_problems(self.split)
        if self.tokenizer is not None and not Path(self.tokenizer).exists():
            problems.append(f"data.tokenizer: {self.tokenizer} does not exist; give a .model or tokenizer.json")
        if self.num_workers < 0:
            problems.append(f"data.num_workers: {self.num_workers} is negative; 0 loads in the rank's own process")
        return problems

    def prefixes(self) -> list[str]:
        """Every prefix named, training first. Raises InputError for a blend that cannot be read."""
        blends = [parse_blend(items) for items in (self.train_data, *self.valid_data.values())]
        return [prefix for blend in blends for prefix in blend.prefixes]


@dataclass(frozen=True)
class Datasets:
    """What there is to train and to validate on: map-style datasets of samples."""

    train: Any
    valid: dict[str, Any]


@dataclass(frozen=True)
class _TokenIds:
    """All that GPTDataset asks of a tokenizer; `unique_identifiers` goes into the names of cached indices."""

    eod: int
    vocab_size: int
    unique_identifiers: dict[str, Any]


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
    repeated, newly shuffled, as often as its number of samples asks for. With more than one epoch,
    megatron-core's shuffle depends on that number: a run that is to be resumed keeps its `train_samples`.

    Raises:
        InputError: a blend that cannot be read, missing files, a set with no whole sample, a split that
            leaves a part no document, an index cache that cannot be written or is not shared by all nodes.
        CorruptError: token files that disagree with their index.
    """
    builder = _Builder(config, seq_length, seed, vocab_size, eod_id)
    train = parse_blend(config.train_data)
    with building_in(builder.cache):
        if config.split is not None and not config.valid_data:
            parts = builder.build(train, {TRAIN: train_samples, VALIDATION: valid_samples}, config.split)
            return Datasets(parts[TRAIN], {SPLIT_VALIDATION: parts[VALIDATION]})
        valid = {
            name: builder.build(parse_blend(items), {VALIDATION: valid_samples})[VALIDATION]
            for name, items in config.valid_data.items()
        }
        return Datasets(builder.build(train, {TRAIN: train_samples})[TRAIN], valid)


class _Builder:
    """Calls megatron-core's builder, after what it takes for granted has been checked."""

    def __init__(self, config: DataConfig, seq_length: int, seed: int, vocab_size: int, eod_id: int) -> None:
        prefixes = config.prefixes()
        self._indices = {prefix: read_index(prefix) for prefix in prefixes}
        default = bin_path(prefixes[0]).absolute().parent / ".index_cache"
        self.cache = Path(config.cache_path) if config.cache_path else default
        self._seq_length = seq_length
        self._seed = seed
        self._vocab_size = vocab_size
        self._eod_id = eod_id

    def build(self, blend: Blend, sizes: dict[int, int | None], split: str | None = None) -> list[Any]:
        """The datasets by part, of `sizes` samples each (None: one epoch; a part left out: none).

        Without a split, the one part of `sizes` is made of all documents.
        """
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
        config = self._config(blend.prefixes, weights, min(sizes), split)
        return list(BlendedMegatronDatasetBuilder(GPTDataset, requested, lambda: True, config).build())

    def _tokens_of(self, blend: Blend, part: int, bounds: Bounds) -> list[int]:
        """The tokens of each prefix between two fractions of its documents, as megatron-core cuts them."""
        tokens = []
        for prefix in blend.prefixes:
            lengths = self._indices[prefix].lengths
            begin, end = (round(bound * len(lengths)) for bound in bounds)
            tokens.append(int(lengths[begin:end].sum(dtype=np.int64)))
            if not tokens[-1]:
                raise InputError(
                    f"{prefix} has {len(lengths)} documents, of which none is left for {PART_NAMES[part]}:"
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
        if len(blend.prefixes) == 1 or blend.weights is not None:
            return blend.weights if len(blend.prefixes) > 1 else None
        for tokens, size in parts:
            if min(tokens) <= self._seq_length or (size is not None and size > self._samples(tokens)):
                return [float(self._indices[prefix].tokens) for prefix in blend.prefixes]
        return None

    def _config(self, prefixes: list[str], weights: list[float] | None, part: int, split: str | None) -> Any:
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

        blend = (prefixes, weights)
        per_split = [blend if position == part else None for position in range(len(PART_NAMES))]
        return GPTDatasetConfig(
            random_seed=self._seed,
            sequence_length=self._seq_length,
            path_to_cache=str(self.cache),
            blend=blend if split is not None else None,
            blend_per_split=per_split if split is None else None,
            split=split,
            tokenizer=_TokenIds(self._eod_id, self._vocab_size, {"documents": fingerprint(prefixes)}),
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
