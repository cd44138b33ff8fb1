"""The datasets of a run, and the numbers of the samples that each step, rank and micro batch takes."""

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from megatron_fanformer.data.batches import micro_batches, sample_numbers, shared_batches
from megatron_fanformer.data.check import CheckedData
from megatron_fanformer.data.datasets import Datasets, build_datasets
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.train.config import RunConfig
from megatron_fanformer.train.preflight import dataset_sizes


def run_datasets(config: RunConfig, data: CheckedData | None = None) -> Datasets:
    """Return a run's training and validation datasets; a collective call if torch.distributed is initialized.

    Args:
        data: the checked token files; None: rank 0 checks them now.

    Raises InputError if data are missing or too few, CorruptError if a token file is damaged.
    """
    return build_datasets(
        config.data,
        seq_length=config.model.seq_length,
        **dataset_sizes(config),
        seed=config.training.seed,
        vocab_size=config.model.vocab_size,
        global_batch_size=config.training.global_batch_size,
        eod_id=config.model.vocab_size - 1,  # without effect: `document_masks`, not GPTDataset, finds the documents
        data=data,
    )


def read_batches(
    config: RunConfig, grid: RankGrid, dataset: Any, *, consumed_samples: int, for_training: bool = False
) -> Generator[dict[str, Tensor], None, None]:
    """Return the micro batches of this rank's replica, starting after the first `consumed_samples` of the run.

    One rank of each tensor and context parallel group reads the samples and sends them to the others.

    Args:
        for_training: use loader processes, and send samples only to the ranks that need them.
    """
    size, has_document_ids = config.training.micro_batch_size, config.data.reset_attention_mask
    return shared_batches(
        lambda: micro_batches(
            dataset,
            consumed_samples=consumed_samples,
            micro_batch_size=size,
            data_parallel_rank=grid.data_parallel_rank,
            data_parallel_size=grid.data_parallel_size,
            num_workers=(config.data.num_workers or 0) if for_training else 0,
        ),
        grid.samples_group,
        micro_batch_size=size,
        seq_length=config.model.seq_length,
        has_document_ids=has_document_ids,
        is_used=not for_training or grid.takes_samples(has_document_ids=has_document_ids),
    )


def consumed_before(config: RunConfig, step: int) -> int:
    """Return the number of samples that a run has consumed before a step. Steps count from 1, as in metrics.jsonl."""
    return (step - 1) * config.training.global_batch_size


class MicroBatch(NamedTuple):
    """The place of a micro batch in a step, and the numbers of its samples; all count from 0."""

    number: int
    data_parallel_rank: int
    samples: list[int]


def step_micro_batches(
    config: RunConfig, dataset_length: int, step: int, data_parallel_size: int
) -> Iterator[MicroBatch]:
    """Yield every micro batch that a step takes from a dataset, over all replicas, in the order of the samples."""
    orders = [
        sample_numbers(
            dataset_length,
            consumed_samples=consumed_before(config, step),
            micro_batch_size=config.training.micro_batch_size,
            data_parallel_rank=rank,
            data_parallel_size=data_parallel_size,
        )
        for rank in range(data_parallel_size)
    ]
    for number in range(config.num_micro_batches(data_parallel_size)):
        for rank, order in enumerate(orders):
            yield MicroBatch(number, rank, next(order))
