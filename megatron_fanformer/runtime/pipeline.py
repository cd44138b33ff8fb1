"""Runs micro batches through the stages by megatron-core's pipeline schedules, for training and evaluation.

If attention stays within documents, the samples of a micro batch form one row, [1, b * s], like megatron-core's packed
sequences (`thd`), and attention reads the bounds of the documents. Context parallel ranks then hold parts of this row,
which may end anywhere in a sample.

Shapes: b samples of a micro batch, s tokens of a sample, cp context parallel ranks, n = b * s / cp.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.profiler import record_function

from megatron_fanformer.runtime.layout import context_chunks
from megatron_fanformer.runtime.parallel import RankGrid

Batches = Iterator[dict[str, Tensor]]
LossFunction = Callable[[Tensor, Tensor], Any]


def run_schedule(
    stages: list[Any],
    batches: Batches,
    grid: RankGrid,
    loss_function: LossFunction,
    *,
    num_micro_batches: int,
    forward_only: bool,
) -> list[Any]:
    """Run the next micro batches through the stages of this rank's replica; all its ranks must pass the same batches.

    Args:
        stages: the chunks of this rank's stage, wrapped in megatron-core's data parallelism or not.
        batches: `tokens`, `labels`, `loss_mask` and `position_ids` of whole samples, each [b, s] (`data/batches.py`).
            If all have `document_ids`, too, attention stays within documents.
        loss_function: called with the losses and the loss mask of each micro batch: this context parallel rank's part,
            [b, s / cp], or, if attention stays within documents, [b, s] with zeros in other ranks' parts. Returns a
            report; for a backward pass, megatron-core's triple: the sum to differentiate, the number of tokens, and
            the report.

    Returns:
        The reports of the micro batches, in order; none on ranks without the last stage.
    """
    with record_function("phase loading samples"):
        first = next(batches)
    micro_batch_size, seq_length = first["tokens"].shape
    if "document_ids" in first:  # the shape of the row that stages send to one another
        micro_batch_size, seq_length = 1, micro_batch_size * seq_length
    # Every chunk of a stage reads all micro batches; the first chunk to read one loads it.
    micro_batches = itertools.chain([first], itertools.islice(batches, num_micro_batches - 1))
    iterators = itertools.tee(micro_batches, len(stages))
    reports: list[Any] = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, grid, loss_function),
        data_iterator=list(iterators) if len(stages) > 1 else iterators[0],
        model=stages,
        num_microbatches=num_micro_batches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,  # or megatron-core would expect the triple without a backward pass, too
    )
    return reports


def _forward_step(grid: RankGrid, loss_function: LossFunction, batches: Batches, stage: Any) -> tuple[Tensor, Any]:
    """Return a chunk's output for the next micro batch, and the function that megatron-core calls with the losses."""
    device = grid.torch_device
    with record_function("phase loading samples"):
        batch = dict(next(batches))
    packed = None
    if (document_ids := batch.pop("document_ids", None)) is not None:
        packed = packed_documents(document_ids, device)
    rows = batch if packed is None else {name: tensor.reshape(1, -1) for name, tensor in batch.items()}
    # Whole tensors are copied to the device and cut there: a part cut on the host would not be in pinned memory, and
    # its copy would block.
    part = {name: local_positions(tensor.to(device, non_blocking=True), grid) for name, tensor in rows.items()}
    with record_function("phase forward"):
        output = stage(
            part["tokens"],
            part["position_ids"],
            None,  # no attention mask: attention is causal
            labels=part["labels"],
            loss_mask=part["loss_mask"],  # the loss head computes the gradient of the masked sum in forward
            packed_seq_params=packed,
        )
    if packed is None:
        return output, lambda losses, **_: loss_function(losses, part["loss_mask"])
    place = partial(_place_in_batch, batch["tokens"].shape, grid)
    return output, lambda losses, **_: loss_function(place(losses), place(part["loss_mask"]))


def _place_in_batch(shape: torch.Size, grid: RankGrid, part_1n: Tensor) -> Tensor:
    """Return [b, s] with this context parallel rank's part of the row of samples at its place, zeros elsewhere."""
    tokens = part_1n.numel()
    before = grid.groups.cp.rank() * tokens
    after = shape.numel() - before - tokens
    return (F.pad(part_1n, (before, after)) if before or after else part_1n).view(shape)


def packed_documents(document_ids_bs: Tensor, device: torch.device | str) -> PackedSeqParams:
    """Return the bounds of a micro batch's documents in the row of its samples, for attention.

    Args:
        document_ids_bs: [b, s], on the CPU, so that computing the bounds does not wait for the device. A document ends
            where the number changes, and at the end of a sample.
    """
    begins_bs = torch.ones_like(document_ids_bs, dtype=torch.bool)
    begins_bs[:, 1:] = document_ids_bs[:, 1:] != document_ids_bs[:, :-1]
    bounds = torch.cat([begins_bs.view(-1).nonzero().view(-1), torch.tensor([begins_bs.numel()])]).int()
    longest = int(bounds.diff().max())
    bounds = bounds.to(device, non_blocking=True)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def local_positions(tensor_bs: Tensor, grid: RankGrid) -> Tensor:
    """Return this context parallel rank's part of [b, s]: [b, s / cp].

    The part is two chunks, one from each end. Ranks that exchange heads have equal work anyway, and get one chunk.
    """
    size = grid.context_parallel_size
    if size == 1:
        return tensor_bs
    if grid.exchanges_heads:
        return tensor_bs.chunk(size, dim=1)[grid.groups.cp.rank()]
    chunks = tensor_bs.chunk(2 * size, dim=1)
    return torch.cat([chunks[number] for number in context_chunks(grid.groups.cp.rank(), size)], dim=1)
