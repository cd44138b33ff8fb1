"""Build the datasets of a run's training and validation samples, and manage the folder of their sample indices.

megatron-core's builder builds blends of .bin and .idx pairs. A source of .npy files is a dataset without an index on
disk. For blends of both, megatron-core's BlendedDataset draws from the datasets of the sources. megatron-core is
imported only in functions, since the import takes seconds.
"""

import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron_fanformer.data.batches import RemoteSamples
from megatron_fanformer.data.blends import PART_NAMES, TRAIN, VALIDATION, Blend, Source
from megatron_fanformer.data.check import CheckedData, check_files, training_conversations, validation_conversations
from megatron_fanformer.data.config import SPLIT_VALIDATION, DataConfig
from megatron_fanformer.data.mixes import Mix, MixDataset, MixOrder, PairEpochs, draw_counts, mix_ends, order_mixes
from megatron_fanformer.data.sample_counts import SampleCounts, Sizes
from megatron_fanformer.data.sample_order import SampleWrapper
from megatron_fanformer.data.samples import ChatDataset, DocumentSamples, NpyDataset
from megatron_fanformer.data.token_files import PairReader
from megatron_fanformer.durable_files import take_lock, write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.runtime.agreement import is_main, on_main

COMPLETE = "complete.json"  # marks a complete folder of indices

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Datasets:
    """The training and validation sets: map-style datasets of samples."""

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
    global_batch_size: int = 1,
    data: CheckedData | None = None,
) -> Datasets:
    """Build the datasets; a collective call if torch.distributed is initialized.

    A set repeats its sources, reshuffled each time, until it has the requested number of samples. If a pair repeats,
    megatron-core's shuffle depends on this number, so a resumed run must keep its `train_samples`. The order of samples
    of .npy files does not depend on the number.

    Args:
        valid_samples: the number of samples of each validation set; None: one epoch of the set.
        global_batch_size: translates the steps of `config.stages` into samples.
        data: the checked token files; None: rank 0 checks them here.
    """
    if config.is_chats:
        settings = {"seq_length": seq_length, "seed": seed, "vocab_size": vocab_size}
        train_chats = ChatDataset(training_conversations(config), samples=train_samples, **settings)
        valid = {
            name: ChatDataset(chats, samples=valid_samples, **settings)
            for name, chats in validation_conversations(config).items()
        }
        return Datasets(train_chats, valid)
    if data is None:
        data = on_main(functools.partial(check_files, config))
    builder = _DatasetBuilder(data=data, seq_length=seq_length, seed=seed, vocab_size=vocab_size, eod_id=eod_id)
    if config.split is not None:
        parts = builder.build_split(data.train, {TRAIN: train_samples, VALIDATION: valid_samples}, config.split)
        train, valid = parts[TRAIN], {SPLIT_VALIDATION: parts[VALIDATION]}
    else:
        valid = {name: builder.build_blend(blend, VALIDATION, valid_samples) for name, blend in data.valid.items()}
        if data.mixes:
            mixes = order_mixes(data.train, data.mixes, global_batch_size=global_batch_size, seq_length=seq_length)
            train = builder.build_mixes(mixes, train_samples)
        else:
            train = builder.build_blend(data.train, TRAIN, train_samples)
    return Datasets(_wrap(train, config, data), {name: _wrap(valid[name], config, data) for name in valid})


def _wrap(dataset: Any, config: DataConfig, data: CheckedData) -> Any:
    """Wrap a dataset, if needed: to mark documents as the configuration says, and to read remote files in parallel."""
    if config.marks_documents:
        assert data.eod_id is not None, "check_files sets it for such a configuration"
        dataset = DocumentSamples(dataset, data.eod_id, config.reset_attention_mask, config.eod_mask_loss)
    return RemoteSamples(dataset) if data.remote_files else dataset


@dataclass(frozen=True)
class BlendSource(SampleWrapper):
    """A source of a mixed blend, with the attributes that megatron-core's BlendedDataset reads."""

    index_split: Any

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """Return the class of the dataset; the indices of a blend depend on nothing else of a source."""
        return {"class": type(self.samples).__name__}


class _DatasetBuilder:
    """Builds datasets with one cache of indices, one sequence length and one seed."""

    def __init__(self, *, data: CheckedData, seq_length: int, seed: int, vocab_size: int, eod_id: int) -> None:
        self._data, self._counts = data, SampleCounts(data, seq_length)
        self._seq_length, self._seed = seq_length, seed
        self._vocab_size, self._eod_id = vocab_size, eod_id

    def build_blend(self, blend: Blend, part: int, size: int | None) -> Any:
        """Return a blend's dataset for training or validation (`part`), of `size` samples or more; None: one epoch."""
        if not any(source.is_npy for source in blend.sources):
            return self._build_pairs(blend, {part: size}, split=None)[part]
        if len(blend.sources) == 1:
            return self._build_npy(blend.sources[0], size)
        weights, total, shares = self._counts.mixed_sizes(blend, size)
        datasets = [
            self.build_blend(Blend([source], None), part, share)
            for source, share in zip(blend.sources, shares, strict=True)
        ]
        return self._build_blended(datasets, blend, part, weights, {"weights": weights, "size": total, "part": part})

    def build_split(self, blend: Blend, sizes: Sizes, split: str) -> dict[int, Any]:
        """Return the datasets of the parts of a split, with `sizes` samples each (None: one epoch)."""
        parts: dict[int, Any] = {}
        for group in self._counts.group_parts(blend, sizes):
            datasets = self._build_pairs(blend, group, split)
            parts |= {part: datasets[part] for part in group}
        return parts

    def build_mixes(self, mixes: Sequence[Mix], samples: int) -> MixDataset:
        """Return the dataset of `samples` training samples of a run of several mixes."""
        sources = list(dict.fromkeys(source for mix in mixes for source in mix.blend.sources))
        source_numbers = {source: number for number, source in enumerate(sources)}
        drawn = np.zeros(len(sources), np.int64)  # the number of samples that the mixes so far draw from each source
        orders = []
        for mix, end in mix_ends(mixes, samples):
            mix_sources = [source_numbers[source] for source in mix.blend.sources]
            size = end - mix.first_sample
            source_index, sample_index = self._mix_index(mix.blend, size)
            drawn_before = drawn[mix_sources].tolist()
            orders.append(MixOrder(mix.first_sample, mix_sources, drawn_before, source_index, sample_index))
            if mix is mixes[-1]:
                drawn[mix_sources] += size  # an upper bound: no mix follows that must know the exact numbers
            else:  # rank 0 counts for all ranks
                drawn[mix_sources] += on_main(functools.partial(draw_counts, source_index, 0, size, len(mix_sources)))
        datasets = [self._build_mix_source(source, int(count)) for source, count in zip(sources, drawn, strict=True)]
        return MixDataset(datasets, orders, samples=samples)

    def _build_mix_source(self, source: Source, length: int) -> Any:
        if source.is_npy:
            return self._build_npy(source, length)
        first_epoch = self._build_pairs(Blend([source], None), {TRAIN: None}, split=None)[TRAIN]
        return PairEpochs(first_epoch, seed=self._seed, length=length)

    def _mix_index(self, blend: Blend, size: int) -> tuple[Any, Any]:
        """Return a mix's `source_index` and `sample_index` (see `MixOrder`), computed by megatron-core's blending."""
        if len(blend.sources) == 1:
            return None, None  # a mix of one source needs no index
        weights = self._counts.mix_weights(blend)
        identity = {"weights": weights, "size": size, "stage": True}  # "stage" tells the folder from those of blends
        # Ranges stand in for the datasets of the sources, since the indices depend on weights and size alone.
        blended = self._build_blended([range(size)] * len(weights), blend, TRAIN, weights, identity)
        return blended.dataset_index, blended.dataset_sample_index

    def _build_npy(self, source: Source, size: int | None) -> NpyDataset:
        settings = {"seq_length": self._seq_length, "seed": self._seed, "vocab_size": self._vocab_size}
        return NpyDataset(self._data.files(source), **settings, samples=size)

    def _build_blended(
        self, datasets: Sequence[Any], blend: Blend, part: int, weights: list[float], identity: dict[str, Any]
    ) -> Any:
        """Return megatron-core's blend of `datasets`, one for each source, with `identity["size"]` samples.

        `identity` holds the values that determine the blend's indices, and names their folder (see `index_folder`).
        """
        from megatron.core.datasets.blended_dataset import BlendedDataset
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.utils import Split

        blend_sources = [BlendSource(dataset, Split(part)) for dataset in datasets]
        kinds = [type(dataset).__name__ for dataset in datasets]
        # megatron-core hashes the datasets' classes into its file names, so blends of different classes need different
        # folders. If all classes are the same, leave them out: adding them would rename the folders of existing caches.
        if len(set(kinds)) > 1:
            identity = {**identity, "kinds": kinds}
        with index_folder(self._data.cache, identity) as folder:
            config = self._config(folder, blend.sources, weights=None, unsplit_part=part, split=None)
            return BlendedMegatronDatasetBuilder.build_generic_dataset(
                BlendedDataset, lambda: True, True, blend_sources, weights, identity["size"], config
            )  # built on all ranks (`lambda`), on rank 0 before the others (`True`)

    def _build_pairs(self, blend: Blend, sizes: Sizes, split: str | None) -> list[Any]:
        """Return the dataset of each part of a blend of pairs, or None for a part that is not in `sizes`.

        A dataset has `sizes[part]` samples; None: one epoch. Without a split, `sizes` has one part, of all documents.
        """
        from megatron.core import __version__
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset

        weights, requested = self._counts.pair_sizes(blend, sizes, is_split=split is not None)
        identity = {
            "megatron": __version__,
            "documents": self._identities(blend.sources),
            "paths": [self._local_prefix(source) for source in blend.sources],  # in megatron-core's file names
            "weights": weights,
            "requested": requested,
            "split": split,
            "seq_length": self._seq_length,
            "seed": self._seed,
        }
        with index_folder(self._data.cache, identity) as folder:
            config = self._config(folder, blend.sources, weights, unsplit_part=min(sizes), split=split)
            if split is not None and len(sizes) == 1:  # without this, megatron-core would build all parts of the split
                config.split_matrix = [
                    bounds if part in sizes else None for part, bounds in enumerate(config.split_matrix)
                ]
            datasets = list(BlendedMegatronDatasetBuilder(GPTDataset, requested, lambda: True, config).build())
        # Let the datasets read by a PairReader, which checks ids, and also reads from other stores.
        pairs = {self._local_prefix(source): self._data.pair(source) for source in blend.sources}
        readers = {path: PairReader(pair, self._vocab_size) for path, pair in pairs.items()}
        for part_dataset in filter(None, datasets):  # a GPTDataset, or a blend with the GPTDatasets of its sources
            for dataset in (part_dataset, *getattr(part_dataset, "datasets", ())):
                if (path := getattr(dataset, "dataset_path", None)) is not None:  # a GPTDataset, not a blend
                    dataset.dataset, dataset.dataset_path = readers[path], pairs[path].prefix
                    dataset.indices = None  # 4 bytes per document, not used once the sample indices are built
        return datasets

    def _local_prefix(self, source: Source) -> str:
        """Return the prefix at which megatron-core finds a pair's index; for .npy files, the first path."""
        return source.paths[0] if source.is_npy else self._data.pair(source).copy or source.paths[0]

    def _identities(self, sources: Sequence[Source]) -> list[str]:
        return [self._data.pair(source).identity for source in sources if not source.is_npy]

    def _config(
        self, folder: Path, sources: Sequence[Source], weights: list[float] | None, unsplit_part: int, split: str | None
    ) -> Any:
        """Return megatron-core's configuration of a blend; without a `split`, all of it belongs to `unsplit_part`."""
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

        # megatron-core expects a tokenizer, and puts its `unique_identifiers` into the names of cached indices.
        documents = {"documents": self._identities(sources)}
        tokenizer = SimpleNamespace(eod=self._eod_id, vocab_size=self._vocab_size, unique_identifiers=documents)
        blend = ([self._local_prefix(source) for source in sources], weights)
        per_split = [blend if part == unsplit_part else None for part in range(len(PART_NAMES))]
        return GPTDatasetConfig(
            random_seed=self._seed,
            sequence_length=self._seq_length,
            path_to_cache=str(folder),
            blend=blend if split is not None else None,
            blend_per_split=per_split if split is None else None,
            split=split,
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )


# -- the folder of sample indices


@contextmanager
def index_folder(cache: Path, identity: Any) -> Iterator[Path]:
    """Yield the folder for the indices of a dataset while the dataset is built; every rank enters this block.

    megatron-core writes indices file by file under their final names, takes them for complete if all names exist, and
    does not put the data into the names. So each dataset gets a folder, named after everything that the indices depend
    on: `identity`, plain JSON values. A complete folder is marked; a folder that a killed job left is built again. Only
    rank 0 writes, and holds the cache's lock meanwhile.

    Raises InputError if the cache cannot be written, or if a rank does not see the files of rank 0.
    """
    folder = cache / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    locks: list[int] = []  # on rank 0: the file descriptor of the cache's lock
    try:
        is_complete = on_main(lambda: _prepare_folder(cache, folder, locks))
        with _lone_process_group() if is_main() else _reporting_unshared_cache(cache):
            yield folder
        if not is_complete:
            on_main(lambda: write_atomically(folder / COMPLETE, "{}"))
    finally:
        for lock in locks:
            os.close(lock)


def _prepare_folder(cache: Path, folder: Path, locks: list[int]) -> bool:
    """Append the cache's lock to `locks`, and empty `folder` unless it is complete; return whether it is complete."""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = take_lock(cache / ".lock", wait=False)
        if lock is None:
            logger.info("index cache %s: waiting for another job that builds in it", cache)
            lock = take_lock(cache / ".lock", wait=True)
    except OSError as error:
        raise InputError(
            f"index cache {cache} cannot be written ({error.strerror}); set data.cache_path to another"
        ) from error
    assert lock is not None
    locks.append(lock)
    is_complete = (folder / COMPLETE).is_file()
    if folder.exists() and not is_complete:
        shutil.rmtree(folder)
    folder.mkdir(exist_ok=True)
    logger.debug("sample indices in %s: %s", folder, "complete, reused" if is_complete else "to be built")
    return is_complete


@contextmanager
def _lone_process_group() -> Iterator[None]:
    """Make a group of this rank alone if there is none: blends of megatron-core 0.16 ask for the rank."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _reporting_unshared_cache(folder: Path) -> Iterator[None]:
    """Raise InputError in place of FileNotFoundError: rank 0 wrote the file to a folder that this rank does not see."""
    try:
        yield
    except FileNotFoundError as error:
        raise InputError(
            f"{error.filename} was written by rank 0 and is not visible to rank {dist.get_rank()};"
            f" set data.cache_path to a folder that all nodes share (now {folder})"
        ) from error
