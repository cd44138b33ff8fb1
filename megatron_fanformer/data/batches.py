"""Micro batches out of a dataset of samples, in an order that no layout and no process count changes."""

import os
import signal
from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

BATCH_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")


def micro_batches(
    dataset: Any,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """This data-parallel rank's micro batches, one after the other, without end.

    The k-th micro batch from here on is samples consumed_samples + (k * dp + r) * b up to b more, r being the
    rank and dp the number of ranks. So a step of m micro batches takes the next m * dp * b samples in order,
    on whatever ranks, and a resumed run passes what it has consumed. Past its end the dataset begins anew.

    Yields `tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32), each [b, s], on the CPU.
    """
    numbers = sample_numbers(
        len(dataset),
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
    )
    loader = DataLoader(
        dataset,
        batch_sampler=numbers,
        num_workers=num_workers,
        # Forked, workers begin at once; a worker that is spawned imports megatron-core first, for seconds.
        multiprocessing_context="fork" if num_workers else None,
        collate_fn=_stack,
        pin_memory=torch.cuda.is_available(),  # so that copies to the GPU go on beside its work
        # The loader draws a seed when it starts: not from the generator of the training, whose state is
        # part of what a resumed run must find unchanged.
        generator=torch.Generator(),
        worker_init_fn=_leave_signals_to_the_rank,
    )
    return iter(loader)


def sample_numbers(
    samples: int,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
) -> Iterator[list[int]]:
    """Which samples of a dataset of `samples` make `micro_batches`' micro batches: a list for each, without end."""
    stride = data_parallel_size * micro_batch_size
    for first in count(consumed_samples + data_parallel_rank * micro_batch_size, stride):
        yield [sample % samples for sample in range(first, first + micro_batch_size)]


def _leave_signals_to_the_rank(_worker: int) -> None:
    """A signal to stop reaches whole process groups; the rank needs its batches until it has saved."""
    os.setpgrp()  # SIGTERM itself keeps its effect: torch ends a worker by it
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _stack(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """One batch of samples; what a blend says of its source is left out."""
    return {name: torch.stack([sample[name] for sample in samples]) for name in BATCH_FIELDS}
