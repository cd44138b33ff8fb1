"""The datasets of training and validation samples of a run.

A blend is built by megatron-core's builder if all its sources are .bin and .idx pairs.

.npy files alone are a dataset of their own, without any index on disk. In a blend of both, megatron-core's
BlendedDataset draws from them as from its own datasets. megatron-core is imported where it is used: it takes seconds.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megatron_fanformer.data.batches import RemoteSamples
from megatron_fanformer.data.blends import PART_NAMES, Blend, Source
from megatron_fanformer.data.chat_dataset import ChatDataset
from megatron_fanformer.data.config import SPLIT_VALIDATION, DataConfig
from megatron_fanformer.data.index_cache import indices_in
from megatron_fanformer.data.npy_dataset import NpyDataset
from megatron_fanformer.data.origins import DocumentSamples, UnrepeatedSamples
from megatron_fanformer.data.packing import training_conversations, validation_conversations
from megatron_fanformer.data.sample_counts import TRAIN, VALIDATION, SampleCounts, Sizes, refuse_npy
from megatron_fanformer.data.staged_dataset import MixOrder, PairEpochs, StagedDataset, StageOrder
from megatron_fanformer.data.stages import Stage, ordered, with_ends
from megatron_fanformer.data.survey import DataSurvey, survey_data
from megatron_fanformer.data.token_files import PairReader
from megatron_fanformer.runtime.agreement import on_main


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
    survey: DataSurvey | None = None,
) -> Datasets:
    """Build the datasets; a collective call where torch.distributed is initialised.

    The steps of `config.stages` count batches of `global_batch_size`. Without a `survey`, rank 0 makes one.
    `valid_samples` is the number of samples of each validation set, None for one epoch of it. A set is
    repeated, reshuffled each time, until it has that many samples. With more than one epoch of .bin and
    .idx pairs, megatron-core's shuffle depends on that number: a resumed run must keep its
    `train_samples`. The order of samples from .npy files does not depend on it.

    Raises:
        InputError: a blend that cannot be read, missing files, a set with no whole sample, a split that
            leaves a part without documents, an index cache that cannot be written or is not shared by all nodes.
        CorruptError: token files that disagree with their index or their manifest.
    """
    if config.is_chats:
        sizes = {"seq_length": seq_length, "seed": seed, "vocab_size": vocab_size}
        chats = ChatDataset(training_conversations(config), samples=train_samples, **sizes)
        conversations = validation_conversations(config).items()
        return Datasets(
            chats, {name: ChatDataset(packed, samples=valid_samples, **sizes) for name, packed in conversations}
        )
    if survey is None:
        survey = on_main(functools.partial(survey_data, config))
    if survey.staging is not None:
        survey.staging.fill()  # on this rank's node
    sets = _DatasetBuilder(survey=survey, seq_length=seq_length, seed=seed, vocab_size=vocab_size, eod_id=eod_id)
    if config.applied_split is not None:
        refuse_npy(survey.train)
        parts = sets.of_split(survey.train, {TRAIN: train_samples, VALIDATION: valid_samples}, config.applied_split)
        train, valid = parts[TRAIN], {SPLIT_VALIDATION: parts[VALIDATION]}
    else:
        valid = {name: sets.of_blend(blend, VALIDATION, valid_samples) for name, blend in survey.valid.items()}
        if survey.stages:
            counts = {"global_batch_size": global_batch_size, "seq_length": seq_length}
            train = sets.of_stages(ordered(survey.train, survey.stages, **counts), train_samples)
        else:
            train = sets.of_blend(survey.train, TRAIN, train_samples)
    if config.mask_repeated_ngrams:
        train = UnrepeatedSamples(train)
    return _marked(Datasets(train, valid), config, survey)


def _marked(datasets: Datasets, config: DataConfig, survey: DataSurvey) -> Datasets:
    """Return datasets that mark documents where the configuration says so, and wait for stores side by side."""
    wrappers: list[Callable[[Any], Any]] = []
    if config.marks_documents:
        assert survey.eod_id is not None, "the survey of this configuration has it"
        wrappers.append(
            functools.partial(
                DocumentSamples,
                eod_id=survey.eod_id,
                reset_attention_mask=config.reset_attention_mask,
                reset_position_ids=config.reset_position_ids,
                eod_mask_loss=config.eod_mask_loss,
            )
        )
    if survey.remote_files:
        wrappers.append(RemoteSamples)
    for wrap in wrappers:
        datasets = Datasets(wrap(datasets.train), {name: wrap(dataset) for name, dataset in datasets.valid.items()})
    return datasets


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

    def __init__(self, *, survey: DataSurvey, seq_length: int, seed: int, vocab_size: int, eod_id: int) -> None:
        self._survey = survey
        self._counts = SampleCounts(survey, seq_length)
        self._seq_length = seq_length
        self._seed = seed
        self._vocab_size = vocab_size
        self._eod_id = eod_id

    def of_blend(self, blend: Blend, part: int, size: int | None) -> Any:
        """Return the dataset of all documents of a blend, of at least `size` samples (None: one epoch), as one of the
        parts.

        Raises InputError and CorruptError as `build_datasets`.
        """
        if not any(source.is_npy for source in blend.sources):
            return self.of_pairs(blend, {part: size}, None)[part]
        if len(blend.sources) > 1:
            return self._of_both(blend, part, size)
        return self._of_npy(blend.sources[0], size)

    def _of_npy(self, source: Source, size: int | None) -> NpyDataset:
        return NpyDataset(
            self._survey.files(source),
            seq_length=self._seq_length,
            seed=self._seed,
            vocab_size=self._vocab_size,
            samples=size,
            cache=self._survey.cache,
        )

    def of_stages(self, stages: Sequence[Stage], samples: int) -> StagedDataset:
        """Return the training samples of a run in stages; raises as `build_datasets`."""
        sources = list(dict.fromkeys(source for stage in stages for source in stage.blend.sources))
        drawn = np.zeros(len(sources), np.int64)
        orders = []
        numbers = {source: number for number, source in enumerate(sources)}
        for stage, end in with_ends(stages, samples):
            places = [numbers[source] for source in stage.blend.sources]
            size = end - stage.first_sample
            mix = self._mix_order(stage.blend, size)
            orders.append(StageOrder(stage.first_sample, places, drawn[places].tolist(), mix))
            if stage is stages[-1]:
                drawn[places] += size  # as many at the most, which nobody need count
            else:
                drawn[places] += on_main(functools.partial(mix.counts, 0, size, len(places)))
        return StagedDataset(
            [self._of_stages_source(source, int(number)) for source, number in zip(sources, drawn, strict=True)],
            orders,
            samples=samples,
        )

    def _of_stages_source(self, source: Source, length: int) -> Any:
        if source.is_npy:
            return self._of_npy(source, length)
        (epoch,) = filter(None, self.of_pairs(Blend([source], None), {TRAIN: None}, None))
        return PairEpochs(epoch, seed=self._seed, cache=self._survey.cache, length=length)

    def _mix_order(self, blend: Blend, size: int) -> MixOrder:
        """Return the order in which megatron-core draws so many samples of a blend."""
        if len(blend.sources) == 1:
            return MixOrder(None, None)
        weights = self._counts.of_stage(blend)
        identity = {"weights": weights, "size": size, "stage": True}
        blended = self._blended([range(size)] * len(weights), blend, TRAIN, weights, identity)
        return MixOrder(blended.dataset_index, blended.dataset_sample_index)

    def _of_both(self, blend: Blend, part: int, size: int | None) -> Any:
        weights, total, shares = self._counts.of_mixed(blend, size)
        samples = [
            self.of_blend(Blend([source], None), part, share)
            for source, share in zip(blend.sources, shares, strict=True)
        ]
        return self._blended(samples, blend, part, weights, {"weights": weights, "size": total, "part": part})

    def _blended(
        self, samples: Sequence[Any], blend: Blend, part: int, weights: list[float], identity: dict[str, Any]
    ) -> Any:
        """Return megatron-core's blend of the samples of all sources, `identity["size"]` of them, with its index in the
        cache.
        """
        from megatron.core.datasets.blended_dataset import BlendedDataset
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.utils import Split

        datasets = [OneOfBlend(dataset, Split(part)) for dataset in samples]
        kinds = [type(dataset).__name__ for dataset in samples]
        if len(set(kinds)) > 1:  # megatron-core's names depend on them; folders of one kind keep their name
            identity = {**identity, "kinds": kinds}
        with indices_in(self._survey.cache, identity) as folder:
            config = self._config(folder, blend.sources, None, part, None)
            blended = BlendedMegatronDatasetBuilder.build_generic_dataset(
                BlendedDataset, lambda: True, True, datasets, weights, identity["size"], config
            )
        return blended

    def of_split(self, blend: Blend, sizes: Sizes, split: str) -> dict[int, Any]:
        """Return the datasets of the parts of a split, as `of_pairs`."""
        parts: dict[int, Any] = {}
        for together in self._counts.built_together(blend, sizes):
            built = self.of_pairs(blend, together, split)
            parts |= {part: built[part] for part in together}
        return parts

    def of_pairs(self, blend: Blend, sizes: Sizes, split: str | None) -> list[Any]:
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
        with indices_in(self._survey.cache, identity) as folder:
            config = self._config(folder, blend.sources, weights, min(sizes), split)
            if split is not None and len(sizes) == 1:
                config.split_matrix = [
                    bounds if part in sizes else None for part, bounds in enumerate(config.split_matrix)
                ]
            built = list(BlendedMegatronDatasetBuilder(GPTDataset, requested, lambda: True, config).build())
        pairs = {pair.copy or pair.prefix: pair for pair in map(self._survey.pair, blend.sources)}
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
        return source.paths[0] if source.is_npy else self._survey.pair(source).copy or source.paths[0]

    def _identities(self, sources: Sequence[Source]) -> list[str]:
        return [self._survey.pair(source).identity for source in sources if not source.is_npy]

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
