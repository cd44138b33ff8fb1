"""The samples of a run: its datasets, and the samples of each step, rank and micro batch.

The trainer takes its datasets from here, and `inspect` the samples of a step.
"""

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from megatron_fanformer.data.batches import micro_batches, sample_numbers, shared_batches
from megatron_fanformer.data.check import CheckedData
from megatron_fanformer.data.datasets import Datasets, build_datasets
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.train.config import RunConfig
from megatron_fanformer.train.preflight import drawn_samples


def run_datasets(config: RunConfig, data: CheckedData | None = None) -> Datasets:
    """Return a run's training and validation samples; a collective call where torch.distributed is initialised.

    Args:
        data: the token files, once checked; None: rank 0 checks them now.

    Raises:
        InputError, CorruptError: those of `build_datasets`.
    """
    train_samples, valid_samples = drawn_samples(config)
    return build_datasets(
        config.data,
        seq_length=config.model.seq_length,
        train_samples=train_samples,
        valid_samples=valid_samples,
        seed=config.training.seed,
        vocab_size=config.model.vocab_size,
        global_batch_size=config.training.global_batch_size,
        eod_id=config.model.vocab_size - 1,  # any: GPTDataset looks for no document boundary (`document_masks` does)
        data=data,
    )


def read_batches(
    config: RunConfig, grid: RankGrid, dataset: Any, *, consumed_samples: int, for_training: bool = False
) -> Generator[dict[str, Tensor], None, None]:
    """Return the micro batches of this rank's replica from a number of samples on.

    One rank of each tensor and context parallel group reads them.

    Args:
        for_training: read through loader processes, and hand samples only to the ranks that use them.
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
    """Return samples that a run has taken when a step begins. Steps count from 1, as in metrics.jsonl."""
    return (step - 1) * config.training.global_batch_size


class MicroBatch(NamedTuple):
    """One micro batch of a step: whose it is, and its samples. All count from 0."""

    number: int
    data_parallel_rank: int
    samples: list[int]


def step_micro_batches(
    config: RunConfig, dataset_length: int, step: int, data_parallel_size: int
) -> Iterator[MicroBatch]:
    """Return every micro batch that a step takes from a dataset, on all ranks, in the order of the samples."""
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
