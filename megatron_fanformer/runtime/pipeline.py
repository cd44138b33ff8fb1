"""A stage's chunks over micro batches, by megatron-core's pipeline schedules: how training and evaluation run forward.

Where attention stays within documents, a micro batch is one row of its samples one after the other, [1, b * s], as
megatron-core's packed sequences (`thd`) are: attention reads the bounds of the documents, and nothing else differs.
Context parallel ranks then hold parts of that row, which may end anywhere in a sample.

Shapes: b micro batch, s sequence.
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
OfLosses = Callable[[Tensor, Tensor], Any]


def run_schedule(
    stages: list[Any],
    batches: Batches,
    grid: RankGrid,
    of_losses: OfLosses,
    *,
    num_micro_batches: int,
    forward_only: bool,
) -> list[Any]:
    """Run the next micro batches through the stages of this rank's replica; every rank of it takes the same ones.

    Args:
        stages: the chunks of this rank's stage, in megatron-core's data parallelism or without.
        batches: `tokens`, `labels`, `loss_mask` and `position_ids` of whole samples, each [b, s] (`data/batches.py`);
            attention stays within documents where all of them have `document_ids`, too.
        of_losses: called with this rank's losses and loss mask, [b, s / context parallel size], of each micro batch
            ([b, s] with zeros in other ranks' parts, where attention stays within documents); returns what is
            reported, or, where there is a backward, megatron-core's triple: the sum to differentiate, the number of
            tokens, and what is reported.

    Returns:
        What was reported of each micro batch, in order; nothing on ranks that do not have the last stage.
    """
    with record_function("phase loading samples"):
        first = next(batches)
    micro_batch_size, seq_length = first["tokens"].shape
    if "document_ids" in first:  # what stages send one another is as long as their one row
        micro_batch_size, seq_length = 1, micro_batch_size * seq_length
    # Each chunk of a stage takes all micro batches; the first to ask for one has it loaded.
    taken = itertools.chain([first], itertools.islice(batches, num_micro_batches - 1))
    iterators = itertools.tee(taken, len(stages))
    reports: list[Any] = get_forward_backward_func()(
        forward_step_func=partial(_forward_step, grid, of_losses),
        data_iterator=list(iterators) if len(stages) > 1 else iterators[0],
        model=stages,
        num_microbatches=num_micro_batches,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return reports


def _forward_step(grid: RankGrid, of_losses: OfLosses, batches: Batches, stage: Any) -> tuple[Tensor, Any]:
    device = grid.torch_device
    with record_function("phase loading samples"):
        batch = dict(next(batches))
    packed = None
    if (document_ids := batch.pop("document_ids", None)) is not None:
        packed = packed_documents(document_ids, device)
    rows = batch if packed is None else {name: tensor.reshape(1, -1) for name, tensor in batch.items()}
    # Whole, from pinned memory: a part that is cut on the host lies in pageable memory, whose copy would be waited for.
    part = {name: own_positions(tensor.to(device, non_blocking=True), grid) for name, tensor in rows.items()}
    with record_function("phase forward"):
        output = stage(
            part["tokens"],
            part["position_ids"],
            None,
            labels=part["labels"],
            loss_mask=part["loss_mask"],  # the loss head takes the gradient of the losses' sum over it
            packed_seq_params=packed,
        )
    if packed is None:
        return output, lambda losses, **_: of_losses(losses, part["loss_mask"])
    samples = partial(_among_samples, batch["tokens"].shape, grid)
    return output, lambda losses, **_: of_losses(samples(losses), samples(part["loss_mask"]))


def _among_samples(shape: torch.Size, grid: RankGrid, part_1n: Tensor) -> Tensor:
    """Return a context parallel rank's part of the row of samples in its place among them: [b, s], zeros around it."""
    tokens = part_1n.numel()
    before = grid.groups.cp.rank() * tokens
    after = shape.numel() - before - tokens
    return (F.pad(part_1n, (before, after)) if before or after else part_1n).view(shape)


def packed_documents(document_ids_bs: Tensor, device: torch.device | str) -> PackedSeqParams:
    """Return the bounds of a micro batch's documents in its one row, for attention.

    Args:
        document_ids_bs: [b, s] on the CPU, where the longest document is found without waiting for the device; a
            document ends where the number changes, and where a sample does.
    """
    begins_bs = torch.ones_like(document_ids_bs, dtype=torch.bool)
    begins_bs[:, 1:] = document_ids_bs[:, 1:] != document_ids_bs[:, :-1]
    bounds = torch.cat([begins_bs.view(-1).nonzero().view(-1), torch.tensor([begins_bs.numel()])]).int()
    longest = int(bounds.diff().max())
    bounds = bounds.to(device, non_blocking=True)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )


def own_positions(tensor_bs: Tensor, grid: RankGrid) -> Tensor:
    """Return this context parallel rank's part of [b, s]: [b, s / cp].

    Two chunks, one from either end; where ranks exchange heads, and so have as much work anyway, a single one.
    """
    size = grid.context_parallel_size
    if size == 1:
        return tensor_bs
    if grid.exchanges_heads:
        return tensor_bs.chunk(size, dim=1)[grid.groups.cp.rank()]
    chunks = tensor_bs.chunk(2 * size, dim=1)
    return torch.cat([chunks[number] for number in context_chunks(grid.groups.cp.rank(), size)], dim=1)
