"""Micro batches that one rank reads for all ranks of its tensor and context parallel group, which take the same ones.

The group's first rank reads; no other has loader processes, or opens a token file in a step. A micro batch is one
broadcast of one buffer on the CPU, of whole samples, out of which context parallel ranks then cut their parts. It says
first whether the samples could be read; if not, all ranks raise the first one's error.

Shapes: b micro batch, s sequence.
"""

from collections.abc import Callable, Generator, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fanformer.data.batches import BATCH_FIELDS, DOCUMENT_IDS
from megatron_fanformer.runtime.agreement import raise_on_all

READ, FAILED = 1, 0  # a simulated rank reads 1 from any tensor (`plan.fake_world.INVENTED`)


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

    Taking one is a collective call; all ranks take as many, and no more than the stream has. In a group of one rank
    they are the stream itself.

    Args:
        read: opens the stream, of `data.batches.BATCH_FIELDS` (and `document_ids`, where `has_document_ids` says so),
            [b, s] on the CPU; called on the first rank alone.
        group: whose tensors are on the CPU: `RankGrid.samples_group`.
        is_used: False where a step needs none (`RankGrid.takes_samples`): micro batches of zeros, which nobody reads.

    Raises:
        FanformerError: the stream's own error, as in `runtime.agreement.raise_on_all`.
    """
    shape = (micro_batch_size, seq_length)
    if not is_used:
        return _unread(shape)
    if group.size() == 1:
        return read()
    stream = read() if group.rank() == 0 else None  # whose loader processes begin now
    return _shared(stream, group, shape, has_document_ids)


def _unread(shape: tuple[int, int]) -> Generator[dict[str, Tensor], None, None]:
    tokens = torch.zeros(shape, dtype=torch.int64)
    batch = {**dict.fromkeys(BATCH_FIELDS, tokens), "loss_mask": tokens.float()}
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
                _fill(batch, next(stream))
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


def _fill(batch: dict[str, Tensor], read: dict[str, Tensor]) -> None:
    assert batch.keys() == read.keys() and batch.keys() >= set(BATCH_FIELDS)
    for name, tensor in read.items():
        assert (tensor.shape, tensor.dtype) == (batch[name].shape, batch[name].dtype), name
        batch[name].copy_(tensor)
