"""The datasets of training and validation samples of a run, and the folder of their sample indices.

A blend is built by megatron-core's builder if all its sources are .bin and .idx pairs. .npy files alone are a dataset
of their own, without any index on disk. In a blend of both, megatron-core's BlendedDataset draws from them as from its
own datasets. megatron-core is imported where it is used: it takes seconds.
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
from megatron_fanformer.data.mixes import Mix, MixDataset, MixOrder, PairEpochs, draw_counts, ordered, with_ends
from megatron_fanformer.data.sample_counts import SampleCounts, Sizes
from megatron_fanformer.data.samples import ChatDataset, DocumentSamples, NpyDataset
from megatron_fanformer.data.token_files import PairReader
from megatron_fanformer.durable_files import take_lock, write_atomically
from megatron_fanformer.errors import InputError
from megatron_fanformer.runtime.agreement import is_main, on_main

COMPLETE = "complete.json"  # in a folder of indices

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
    """Build the datasets; a collective call where torch.distributed is initialised.

    A set is repeated, reshuffled each time, until it has its number of samples. With more than one epoch of .bin and
    .idx pairs, megatron-core's shuffle depends on that number: a resumed run must keep its `train_samples`. The order
    of samples from .npy files does not depend on it.

    Args:
        valid_samples: the number of samples of each validation set; None: one epoch of it.
        global_batch_size: counts the steps of `config.stages`.
        data: the token files; None: rank 0 checks them.
    """
    if config.is_chats:
        sizes = {"seq_length": seq_length, "seed": seed, "vocab_size": vocab_size}
        chats = ChatDataset(training_conversations(config), samples=train_samples, **sizes)
        conversations = validation_conversations(config).items()
        return Datasets(
            chats, {name: ChatDataset(packed, samples=valid_samples, **sizes) for name, packed in conversations}
        )
    if data is None:
        data = on_main(functools.partial(check_files, config))
    sets = _DatasetBuilder(data=data, seq_length=seq_length, seed=seed, vocab_size=vocab_size, eod_id=eod_id)
    if config.split is not None:
        parts = sets.of_split(data.train, {TRAIN: train_samples, VALIDATION: valid_samples}, config.split)
        train, valid = parts[TRAIN], {SPLIT_VALIDATION: parts[VALIDATION]}
    else:
        valid = {name: sets.of_blend(blend, VALIDATION, valid_samples) for name, blend in data.valid.items()}
        if data.mixes:
            counts = {"global_batch_size": global_batch_size, "seq_length": seq_length}
            train = sets.of_mixes(ordered(data.train, data.mixes, **counts), train_samples)
        else:
            train = sets.of_blend(data.train, TRAIN, train_samples)
    return Datasets(_wrapped(train, config, data), {name: _wrapped(valid[name], config, data) for name in valid})


def _wrapped(dataset: Any, config: DataConfig, data: CheckedData) -> Any:
    """Return a dataset that marks documents where the configuration says so, and waits for stores side by side."""
    if config.marks_documents:
        assert data.eod_id is not None, "the check of this configuration finds it"
        dataset = DocumentSamples(
            dataset,
            eod_id=data.eod_id,
            reset_attention_mask=config.reset_attention_mask,
            eod_mask_loss=config.eod_mask_loss,
        )
    return RemoteSamples(dataset) if data.remote_files else dataset


@dataclass(frozen=True)
class OneOfBlend:
    """A source of a mixed blend, in the form that BlendedDataset expects of all its datasets."""

    samples: Any
    index_split: Any

    @property
    def unique_identifiers(self) -> dict[str, Any]:
        """Return the kind of the source: the blend's index depends on its weights and its length alone."""
        return {"class": type(self.samples).__name__}

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item: dict[str, Any] = self.samples[index]
        return item


class _DatasetBuilder:
    """Builds datasets in one cache, with one sequence length and seed."""

    def __init__(self, *, data: CheckedData, seq_length: int, seed: int, vocab_size: int, eod_id: int) -> None:
        self._data = data
        self._counts = SampleCounts(data, seq_length)
        self._seq_length = seq_length
        self._seed = seed
        self._vocab_size = vocab_size
        self._eod_id = eod_id

    def of_blend(self, blend: Blend, part: int, size: int | None) -> Any:
        """Return the dataset of all documents of a blend, of at least `size` samples (None: one epoch), as a part."""
        if not any(source.is_npy for source in blend.sources):
            return self._of_pairs(blend, {part: size}, None)[part]
        if len(blend.sources) == 1:
            return self._of_npy(blend.sources[0], size)
        weights, total, shares = self._counts.of_mixed(blend, size)
        samples = [
            self.of_blend(Blend([source], None), part, share)
            for source, share in zip(blend.sources, shares, strict=True)
        ]
        return self._blended(samples, blend, part, weights, {"weights": weights, "size": total, "part": part})

    def of_split(self, blend: Blend, sizes: Sizes, split: str) -> dict[int, Any]:
        """Return the datasets of the parts of a split, of `sizes` samples each (None: one epoch)."""
        parts: dict[int, Any] = {}
        for together in self._counts.built_together(blend, sizes):
            built = self._of_pairs(blend, together, split)
            parts |= {part: built[part] for part in together}
        return parts

    def of_mixes(self, mixes: Sequence[Mix], samples: int) -> MixDataset:
        """Return the training samples of a run of several mixes."""
        sources = list(dict.fromkeys(source for mix in mixes for source in mix.blend.sources))
        numbers = {source: number for number, source in enumerate(sources)}
        drawn = np.zeros(len(sources), np.int64)
        orders = []
        for mix, end in with_ends(mixes, samples):
            places = [numbers[source] for source in mix.blend.sources]
            size = end - mix.first_sample
            index = self._mix_index(mix.blend, size)
            orders.append(MixOrder(mix.first_sample, places, drawn[places].tolist(), *index))
            if mix is mixes[-1]:
                drawn[places] += size  # as many at the most, which nobody need count
            else:
                drawn[places] += on_main(functools.partial(draw_counts, index[0], 0, size, len(places)))
        datasets = [self._of_mix_source(source, int(count)) for source, count in zip(sources, drawn, strict=True)]
        return MixDataset(datasets, orders, samples=samples)

    def _of_mix_source(self, source: Source, length: int) -> Any:
        if source.is_npy:
            return self._of_npy(source, length)
        (epoch,) = filter(None, self._of_pairs(Blend([source], None), {TRAIN: None}, None))
        return PairEpochs(epoch, seed=self._seed, length=length)

    def _mix_index(self, blend: Blend, size: int) -> tuple[Any, Any]:
        """Return the source of each sample of a blend, as megatron-core draws them, and its number there."""
        if len(blend.sources) == 1:
            return None, None
        weights = self._counts.of_mix(blend)
        identity = {"weights": weights, "size": size, "stage": True}
        blended = self._blended([range(size)] * len(weights), blend, TRAIN, weights, identity)
        return blended.dataset_index, blended.dataset_sample_index

    def _of_npy(self, source: Source, size: int | None) -> NpyDataset:
        stated = {"seq_length": self._seq_length, "seed": self._seed, "vocab_size": self._vocab_size}
        return NpyDataset(self._data.files(source), **stated, samples=size)

    def _blended(
        self, samples: Sequence[Any], blend: Blend, part: int, weights: list[float], identity: dict[str, Any]
    ) -> Any:
        """Return megatron-core's blend of the samples of all sources, `identity["size"]` of them."""
        from megatron.core.datasets.blended_dataset import BlendedDataset
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.utils import Split

        datasets = [OneOfBlend(dataset, Split(part)) for dataset in samples]
        kinds = [type(dataset).__name__ for dataset in samples]
        if len(set(kinds)) > 1:  # megatron-core's names depend on them; folders of one kind keep their name
            identity = {**identity, "kinds": kinds}
        with indices_in(self._data.cache, identity) as folder:
            config = self._config(folder, blend.sources, None, part, None)
            blended = BlendedMegatronDatasetBuilder.build_generic_dataset(
                BlendedDataset, lambda: True, True, datasets, weights, identity["size"], config
            )
        return blended

    def _of_pairs(self, blend: Blend, sizes: Sizes, split: str | None) -> list[Any]:
        """Return the datasets of pairs by part, of `sizes` samples each (None: one epoch; a part left out: none).

        Without a split, the one part of `sizes` is made of all documents.
        """
        from megatron.core import __version__
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset

        weights, requested = self._counts.of_pairs(blend, sizes, is_split=split is not None)
        identity = {
            "megatron": __version__,
            "documents": self._identities(blend.sources),
            "paths": [self._prefix_here(source) for source in blend.sources],  # megatron-core's names depend on them
            "weights": weights,
            "requested": requested,
            "split": split,
            "seq_length": self._seq_length,
            "seed": self._seed,
        }
        with indices_in(self._data.cache, identity) as folder:
            config = self._config(folder, blend.sources, weights, min(sizes), split)
            if split is not None and len(sizes) == 1:
                config.split_matrix = [
                    bounds if part in sizes else None for part, bounds in enumerate(config.split_matrix)
                ]
            built = list(BlendedMegatronDatasetBuilder(GPTDataset, requested, lambda: True, config).build())
        pairs = {pair.copy or pair.prefix: pair for pair in map(self._data.pair, blend.sources)}
        readers: dict[str, PairReader] = {}  # the parts of a split share one
        for top in filter(None, built):
            for dataset in (top, *getattr(top, "datasets", ())):
                if (path := getattr(dataset, "dataset_path", None)) is None:
                    continue  # a blend reads no pair itself
                pair = pairs[path]
                if path not in readers:
                    readers[path] = PairReader(pair, self._vocab_size)
                dataset.dataset, dataset.dataset_path = readers[path], pair.prefix
                dataset.indices = None  # of 4 bytes a document, which its samples are not drawn from
        return built

    def _prefix_here(self, source: Source) -> str:
        return source.paths[0] if source.is_npy else self._data.pair(source).copy or source.paths[0]

    def _identities(self, sources: Sequence[Source]) -> list[str]:
        return [self._data.pair(source).identity for source in sources if not source.is_npy]

    def _config(
        self, folder: Path, sources: Sequence[Source], weights: list[float] | None, part: int, split: str | None
    ) -> Any:
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

        # In the place of a tokenizer; `unique_identifiers` goes into names of cached indices.
        documents = {"documents": self._identities(sources)}
        ids = SimpleNamespace(eod=self._eod_id, vocab_size=self._vocab_size, unique_identifiers=documents)
        blend = ([self._prefix_here(source) for source in sources], weights)
        per_split = [blend if position == part else None for position in range(len(PART_NAMES))]
        return GPTDatasetConfig(
            random_seed=self._seed,
            sequence_length=self._seq_length,
            path_to_cache=str(folder),
            blend=blend if split is not None else None,
            blend_per_split=per_split if split is None else None,
            split=split,
            tokenizer=ids,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )


# -- the folder of sample indices


@contextmanager
def indices_in(cache: Path, identity: Any) -> Iterator[Path]:
    """Yield the folder for the indices of a dataset, while it is being built; to be entered by every rank.

    megatron-core writes indices file by file under their final names, and assumes that they are complete as soon as all
    names exist; the names do not depend on the data. So each dataset has a folder of its own, named after its
    `identity`: all that its indices depend on, as plain JSON values. It is marked once it is complete; what a killed
    job left is built again. Rank 0, the only one that writes, holds the cache's lock meanwhile.

    Raises InputError where the cache cannot be written, or a rank does not see the files of rank 0.
    """
    folder = cache / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
    locks: list[int] = []  # on rank 0: the cache's
    try:
        is_complete = on_main(lambda: _prepare_folder(cache, folder, locks))
        with _process_group() if is_main() else _reporting_unshared_cache(cache):
            yield folder
        if not is_complete:
            on_main(lambda: write_atomically(folder / COMPLETE, "{}"))
    finally:
        for lock in locks:
            os.close(lock)


def _prepare_folder(cache: Path, folder: Path, locks: list[int]) -> bool:
    """Take the cache's lock, and keep a complete folder or leave an empty one; return whether it is complete."""
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
def _process_group() -> Iterator[None]:
    """Make a process group of one rank where none exists: blends of megatron-core 0.16 ask for the rank."""
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
