"""Micro batches from a dataset of samples, in an order that depends on neither the layout nor the process count.

The ranks of a tensor and context parallel group take the same ones. The group's first rank reads for all; no other has
loader processes, or opens a token file in a step. A micro batch is one broadcast of one buffer on the CPU, of whole
samples, out of which context parallel ranks then cut their parts. It says first whether the samples could be read; if
not, all ranks raise the first one's error.

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

from megatron_fanformer.data.remote_files import side_by_side
from megatron_fanformer.errors import FanformerError
from megatron_fanformer.runtime.agreement import raise_on_all

BATCH_FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
READ_AHEAD_SAMPLES = 32  # of a loader's task, where samples come from other stores: requests wait side by side
DOCUMENT_IDS = "document_ids"
"""One more key, of samples whose attention stays within documents: 0, 1, 2 … by document, never falling."""
READ, FAILED = 1, 0  # a simulated rank reads 1 from any tensor (`plan.simulation.INVENTED`)


def micro_batches(
    dataset: Any,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_workers: int = 0,
) -> Generator[dict[str, Tensor], None, None]:
    """Yield this data-parallel rank's micro batches, one after the other, without end.

    They are `tokens`, `labels`, `position_ids` (int64) and `loss_mask` (float32), each [b, s], on the CPU; and
    `document_ids` (int32), [b, s], where the samples have them. Errors are the dataset's.

    The k-th micro batch from here on is the b samples from consumed_samples + (k * dp + r) * b on, where r is the
    rank and dp the number of ranks. So a step of m micro batches takes the next m * dp * b samples in order, on
    whatever ranks, and a resumed run goes on where it stopped. Past its end the dataset starts over.

    `close` ends the loader processes; in the hands of the garbage collector, torch waits five seconds for each.
    """
    numbers = sample_numbers(
        len(dataset),
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
    )
    ahead = max(1, -(-READ_AHEAD_SAMPLES // micro_batch_size)) if isinstance(dataset, RemoteSamples) else 1
    loader = DataLoader(
        _ErrorsAsSamples(dataset),
        batch_sampler=_joined(numbers, ahead),
        num_workers=num_workers,
        # Forked workers start at once; a spawned worker first imports megatron-core, which takes seconds.
        multiprocessing_context="fork" if num_workers else None,
        collate_fn=functools.partial(_stack_each, micro_batch_size),
        pin_memory=torch.cuda.is_available(),  # so that copies to the GPU overlap with its work
        # The loader draws a seed when it starts: not from the training's own generator, whose state a
        # resumed run must find unchanged.
        generator=torch.Generator(),
        worker_init_fn=_begin_process,
    )
    return _raised(iter(loader))  # whose processes have begun


@dataclass(frozen=True)
class RemoteSamples:
    """Samples that are read from other stores, many at a time: their requests wait side by side."""

    samples: Any

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item: dict[str, Tensor] = self.samples[index]
        return item


@dataclass(frozen=True)
class _ErrorsAsSamples(Dataset[Any]):
    """A dataset that returns its errors for the user: torch turns those raised in its processes into tracebacks."""

    dataset: Any

    def __getitem__(self, sample: int) -> Any:
        try:
            return self.dataset[sample]
        except FanformerError as error:
            return error

    def __getitems__(self, samples: list[int]) -> list[Any]:
        """Return the samples of a loader's task, as torch calls this."""
        if isinstance(self.dataset, RemoteSamples):
            return side_by_side(self.__getitem__, samples)
        return list(map(self.__getitem__, samples))


def _joined(numbers: Iterator[list[int]], ahead: int) -> Iterator[list[int]]:
    """Yield the samples of `ahead` micro batches together: a loader's task."""
    while joined := [number for batch in itertools.islice(numbers, ahead) for number in batch]:
        yield joined


def _raised(batches: Iterator[list[Any]]) -> Generator[dict[str, Tensor], None, None]:
    try:
        for batch in itertools.chain.from_iterable(batches):
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
    samples: int, *, consumed_samples: int, micro_batch_size: int, data_parallel_rank: int, data_parallel_size: int
) -> Iterator[list[int]]:
    """Yield the numbers of the samples, of `samples`, in each of `micro_batches`' micro batches, without end."""
    stride = data_parallel_size * micro_batch_size
    for first in count(consumed_samples + data_parallel_rank * micro_batch_size, stride):
        yield [sample % samples for sample in range(first, first + micro_batch_size)]


def _begin_process(_worker: int) -> None:
    """Ignore signals to stop, which reach whole process groups: the rank needs its batches until it has saved.

    Collect garbage, too, which a rank in the middle of its run leaves to its loop.
    """
    gc.enable()
    os.setpgrp()  # SIGTERM keeps its effect: torch ends a worker with it
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _stack_each(size: int, samples: list[Any]) -> list[dict[str, Tensor] | FanformerError]:
    return [_stack(samples[first : first + size]) for first in range(0, len(samples), size)]


def _stack(samples: list[Any]) -> dict[str, Tensor] | FanformerError:
    """Return one batch of samples, or the first error among them. Fields of a blend about their source are left out."""
    if error := next((sample for sample in samples if isinstance(sample, FanformerError)), None):
        return error
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
    """Return the micro batches of a stream that the group's first rank opens, on all ranks of the group.

    Taking one is a collective call, and raises the stream's own error on all. In a group of one rank they are the
    stream itself.

    Args:
        read: opens the stream, of `BATCH_FIELDS` and perhaps `document_ids`, [b, s] on the CPU; called on the first
            rank alone.
        group: whose tensors are on the CPU: `RankGrid.samples_group`.
        is_used: False where a step needs none (`RankGrid.takes_samples`): micro batches of zeros, which nobody reads.
    """
    shape = (micro_batch_size, seq_length)
    if not is_used:
        zeros = torch.zeros(shape, dtype=torch.int64)
        return _repeat({**dict.fromkeys(BATCH_FIELDS, zeros), "loss_mask": zeros.float()})
    if group.size() == 1:
        return read()
    stream = read() if group.rank() == 0 else None  # whose loader processes begin now
    return _shared(stream, group, shape, has_document_ids)


def _repeat(batch: dict[str, Tensor]) -> Generator[dict[str, Tensor], None, None]:
    while True:
        yield batch


def _shared(
    stream: Iterator[dict[str, Tensor]] | None, group: dist.ProcessGroup, shape: tuple[int, int], has_document_ids: bool
) -> Generator[dict[str, Tensor], None, None]:
    while True:
        buffer, batch = _buffer(shape, has_document_ids)
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


def _buffer(shape: tuple[int, int], has_document_ids: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a buffer of int64 for one micro batch, and the micro batch's tensors, [b, s], as views of it."""
    tokens = shape[0] * shape[1]
    of_four_bytes = 2 if has_document_ids else 1
    length = 1 + 3 * tokens + -(-of_four_bytes * tokens // 2)
    buffer = torch.empty(length, dtype=torch.int64, pin_memory=torch.cuda.is_available())
    ids, others = buffer[1 : 1 + 3 * tokens].view(3, *shape), buffer[1 + 3 * tokens :]
    batch = dict(zip(("tokens", "labels", "position_ids"), ids, strict=True))
    batch["loss_mask"] = others.view(torch.float32)[:tokens].view(shape)
    if has_document_ids:
        batch[DOCUMENT_IDS] = others.view(torch.int32)[tokens : 2 * tokens].view(shape)
    return buffer, batch
