"""Training and validation samples out of token files: megatron-core's own datasets, and those of .npy files.

megatron-core is imported where it is used, not above: the configuration here is read by processes that never
build a dataset.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_fanformer.data.blends import Blend, Source, blend_problems, parse_blend, split_problems
from megatron_fanformer.data.npy_files import NpyType, check_npy_ids, open_npy_files
from megatron_fanformer.data.token_files import check_token_ids
from megatron_fanformer.errors import InputError

TRAIN, VALIDATION = 0, 1  # positions in megatron-core's lists
SPLIT_VALIDATION = "validation"  # the name of the validation set that a split cuts off


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the samples come from."""

    train_data: list[str] = field(default_factory=list)
    """Prefixes of token files, .npy files (also as a glob or a folder), or Megatron's blend form: weight prefix
    weight prefix …; @FILE stands for the words of a file."""
    valid_data: dict[str, list[str]] = field(default_factory=dict)
    """Validation sets by name, each in the form of train_data."""
    split: str | None = None
    """Where valid_data is empty: cuts train_data into parts, e.g. "99,1,0" (training, validation, test)."""
    npy_dtype: NpyType = "uint16"
    """The type of the token ids in .npy files that have no manifest beside them."""
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
            elif not problems and any(source.is_npy for source in self.sources()):
                problems.append(
                    "data.split: cuts by documents, and .npy files do not tell them apart; name files of their own as"
                    " data.valid_data"
                )
            problems += split_problems(self.split)
        if self.tokenizer is not None and not Path(self.tokenizer).exists():
            problems.append(f"data.tokenizer: {self.tokenizer} does not exist; give a .model or tokenizer.json")
        if self.num_workers < 0:
            problems.append(f"data.num_workers: {self.num_workers} is negative; 0 loads in the rank's own process")
        return problems

    def sources(self) -> Iterator[Source]:
        """Every source named, training first. Raises InputError for a blend that cannot be read."""
        for items in (self.train_data, *self.valid_data.values()):
            yield from parse_blend(items).sources

    def prefixes(self) -> list[str]:
        """The prefix of every pair and .npy file named, likewise."""
        return [prefix for source in self.sources() for prefix in source.prefixes]

    def index_cache(self) -> Path:
        """The folder for sample indices. Raises InputError likewise."""
        if self.cache_path:
            return Path(self.cache_path)
        return next(self.sources()).files[0].absolute().parent / ".index_cache"

    def check_token_ids(self, vocab_size: int) -> None:
        """Open every token file, and hold its ids against the vocabulary.

        Raises:
            InputError: missing files, a .npy file with NumPy's own header, or an id outside [0, vocab_size).
            CorruptError: token files that disagree with their index or their manifest.
        """
        cache = self.index_cache()
        for source in dict.fromkeys(self.sources()):
            if source.is_npy:
                check_npy_ids(open_npy_files(source.paths, self.npy_dtype), vocab_size, cache=cache)
            else:
                check_token_ids(source.paths, vocab_size, cache=cache)


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
    from megatron_fanformer.data.sample_sets import SampleSets

    sets = SampleSets(
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
