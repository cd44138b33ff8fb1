"""Micro batches from a dataset of samples, in an order that depends on neither the layout nor the process count.

All ranks of a tensor and context parallel group take the same micro batches. Only the group's first rank reads token
files and has loader processes. It broadcasts each micro batch as one buffer on the CPU. The samples in it have their
full length; context parallel ranks then cut out their parts. The first value of the buffer is a flag: if the first
rank could not read the samples, all ranks raise the first rank's error.

Shapes: b micro batch, s sequence.
"""

import functools
import gc
import itertools
import os
import signal
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron_fanformer.data.remote_files import map_in_threads
from megatron_fanformer.data.sample_order import SampleWrapper
from megatron_fanformer.errors import FanformerError
from megatron_fanformer.runtime.agreement import raise_on_all

BATCH_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
READ_AHEAD_SAMPLES = 32  # a loader process reads at least so many remote samples at a time: their requests overlap
DOCUMENT_IDS = "document_ids"
"""A field of samples if attention stays within documents: for each token, its document's number in the sample."""
READ, FAILED = 1, 0  # flags; READ is 1 since a simulated rank reads 1 from any tensor (`plan.simulation.INVENTED`)


def micro_batches(
    dataset: Any,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int = 0,
) -> Generator[dict[str, Tensor], None, None]:
    """Start the loader processes, and return an endless stream of this data-parallel rank's micro batches.

    A micro batch has `tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32), each [b, s], on the CPU; and
    `document_ids` (int32), [b, s], if the samples have them. The stream raises the errors of the dataset.

    On data-parallel rank r of dp ranks, micro batch k = 0, 1, … begins with sample consumed_samples + (k * dp + r) * b.
    So a step of m micro batches takes the next m * dp * b samples in order, for any dp, and a resumed run goes on where
    it stopped. After its last sample the dataset starts over.

    Close the stream to end the loader processes: if it is garbage-collected instead, torch waits 5 s for each process.
    """
    numbers = sample_numbers(
        len(dataset),
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
    )
    # The micro batches that a loader process reads at a time: remote ones are grouped to hold READ_AHEAD_SAMPLES.
    task_size = -(-READ_AHEAD_SAMPLES // micro_batch_size) if isinstance(dataset, RemoteSamples) else 1
    loader = DataLoader(
        _ErrorsAsSamples(dataset),
        batch_sampler=_group_for_loader(numbers, task_size),
        num_workers=num_workers,
        # Forked workers start at once; a spawned worker first imports megatron-core, which takes seconds.
        multiprocessing_context="fork" if num_workers else None,
        collate_fn=functools.partial(_stack_micro_batches, micro_batch_size),
        pin_memory=torch.cuda.is_available(),  # so that copies to the GPU overlap with its work
        # A loader draws a seed when it starts. Drawn from torch's global generator, the seed would make a
        # resumed run, which starts a loader once more, draw other random numbers than the original run.
        generator=torch.Generator(),
        worker_init_fn=_set_up_loader_process,
    )
    return _raise_errors(iter(loader))  # iter() starts the processes


class RemoteSamples(SampleWrapper):
    """A dataset with files on other stores: a loader process reads many samples at a time, so that requests overlap."""


@dataclass(frozen=True)
class _ErrorsAsSamples(Dataset[Any]):
    """A dataset that returns a FanformerError instead of raising it: a loader process would wrap it in a traceback."""

    dataset: Any

    def __getitem__(self, sample: int) -> Any:
        try:
            return self.dataset[sample]
        except FanformerError as error:
            return error

    def __getitems__(self, samples: list[int]) -> list[Any]:
        """Return the samples with these numbers; torch calls this for all samples of a task."""
        if isinstance(self.dataset, RemoteSamples):
            return map_in_threads(self.__getitem__, samples)
        return list(map(self.__getitem__, samples))


def _group_for_loader(numbers: Iterator[list[int]], task_size: int) -> Iterator[list[int]]:
    """Yield the sample numbers of `task_size` micro batches as one list: the task that a loader takes at a time."""
    while task := list(itertools.chain.from_iterable(itertools.islice(numbers, task_size))):
        yield task


def _raise_errors(tasks: Iterator[list[Any]]) -> Generator[dict[str, Tensor], None, None]:
    """Yield the micro batches that loader tasks return. Raise a FanformerError among them, or one if a loader died."""
    try:
        for batch in itertools.chain.from_iterable(tasks):
            if isinstance(batch, FanformerError):
                raise batch
            yield batch
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise FanformerError(
            "a loader process ended, for lack of memory or of shared memory (/dev/shm); give the machine or container "
            f"more, or set data.num_workers to 0 ({' '.join(str(error).split())})"
        ) from error


def sample_numbers(
    dataset_size: int, *, consumed_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> Iterator[list[int]]:
    """Yield, without end, the sample numbers of each micro batch, by the rule of `micro_batches`."""
    stride = data_parallel_size * micro_batch_size
    for first in count(consumed_samples + data_parallel_rank * micro_batch_size, stride):
        yield [sample % dataset_size for sample in range(first, first + micro_batch_size)]


def _set_up_loader_process(_worker: int) -> None:
    """Leave the rank's process group and ignore signals to stop: the rank needs micro batches until it has saved."""
    gc.enable()  # a training rank has switched it off, and its forked loaders would inherit that
    os.setpgrp()  # signals to the rank's group do not reach the loader
    for number in (signal.SIGINT, signal.SIGUSR1):  # not SIGTERM, by which torch ends a loader process
        signal.signal(number, signal.SIG_IGN)


def _stack_micro_batches(size: int, samples: list[Any]) -> list[dict[str, Tensor] | FanformerError]:
    return [_stack(samples[first : first + size]) for first in range(0, len(samples), size)]


def _stack(samples: list[Any]) -> dict[str, Tensor] | FanformerError:
    """Return samples as one batch, without the `dataset_id` that a blend adds; or the first error among them."""
    for sample in samples:
        if isinstance(sample, FanformerError):
            return sample
    names = [*BATCH_FIELDS, DOCUMENT_IDS] if DOCUMENT_IDS in samples[0] else BATCH_FIELDS
    return {name: torch.stack([sample[name] for sample in samples]) for name in names}


# -- one reader for a tensor and context parallel group


def shared_batches(
    read: Callable[[], Generator[dict[str, Tensor], None, None]],
    group: dist.ProcessGroup,
    *,
    micro_batch_size: int,
    seq_length: int,
    has_document_ids: bool = False,
    is_used: bool = True,
) -> Generator[dict[str, Tensor], None, None]:
    """Return a stream of micro batches on every rank of a group; only the first rank reads them.

    Taking a micro batch is a collective call. If the first rank cannot read it, all ranks raise the first rank's error.

    Args:
        read: returns the first rank's stream, of `BATCH_FIELDS` and perhaps `document_ids`, [b, s] on the CPU.
        group: a group that broadcasts tensors on the CPU: `RankGrid.samples_group`.
        is_used: False on a rank whose stage needs no samples (`RankGrid.takes_samples`); its micro batches are zeros.
    """
    shape = (micro_batch_size, seq_length)
    if not is_used:
        zeros = torch.zeros(shape, dtype=torch.int64)
        batch = {**dict.fromkeys(BATCH_FIELDS, zeros), "loss_mask": zeros.float()}
        return (batch for _ in count())
    if group.size() == 1:
        return read()
    stream = read() if group.rank() == 0 else None  # now, so that loader processes start before the first batch
    return _broadcast_batches(stream, group, shape, has_document_ids)


def _broadcast_batches(
    stream: Iterator[dict[str, Tensor]] | None, group: dist.ProcessGroup, shape: tuple[int, int], has_document_ids: bool
) -> Generator[dict[str, Tensor], None, None]:
    """Broadcast the micro batches of `stream`, which is None on all ranks but the first, and yield them."""
    while True:
        buffer, batch = _allocate_buffer(shape, has_document_ids)
        failure: Exception | None = None
        if stream is not None:
            try:
                for name, tensor in next(stream).items():
                    batch[name].copy_(tensor)
            except Exception as error:
                failure = error
            buffer[0] = FAILED if failure else READ
        dist.broadcast(buffer, group=group, group_src=0)
        if int(buffer[0]) == FAILED:
            raise_on_all(failure, group)
        yield batch


def _allocate_buffer(shape: tuple[int, int], has_document_ids: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Return an int64 buffer for a flag and one micro batch, and the batch's tensors, [b, s], as views of it."""
    tokens = shape[0] * shape[1]
    int64_end = 1 + 3 * tokens
    four_byte_values = 2 * tokens if has_document_ids else tokens
    length = int64_end + -(-four_byte_values // 2)  # two values in each int64, rounded up
    buffer = torch.empty(length, dtype=torch.int64, pin_memory=torch.cuda.is_available())
    batch = dict(zip(("tokens", "labels", "position_ids"), buffer[1:int64_end].view(3, *shape), strict=True))
    batch["loss_mask"] = buffer[int64_end:].view(torch.float32)[:tokens].view(shape)
    if has_document_ids:
        batch[DOCUMENT_IDS] = buffer[int64_end:].view(torch.int32)[tokens : 2 * tokens].view(shape)
    return buffer, batch
