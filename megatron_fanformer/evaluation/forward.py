"""Losses summed by row, in any layout: what every evaluation is made of.

Perplexity, validation loss and the likelihood of an answer are one thing: the cross entropy of some of a row's labels,
which the loss mask chooses. No rank ever has whole logits, since the loss is taken over parts of the vocabulary.

Shapes: b micro batch, s sequence.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fanformer.runtime import heartbeat
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.runtime.pipeline import Batches, run_schedule


@torch.no_grad()
def row_losses(
    stages: list[Any],
    batches: Batches,
    grid: RankGrid,
    *,
    num_micro_batches: int,
    micro_batch_size: int,
    seq_length: int,
) -> Tensor:
    """The next micro batches' losses, summed over the loss mask, by row; a collective call of one replica.

    Args:
        stages: the chunks of this rank's stage, in megatron-core's data parallelism or without; `evaluating` them.
        batches: this replica's micro batches, [b, s] each of `data.batches.BATCH_FIELDS`, on the CPU.
        num_micro_batches: a multiple of `micro_batch_multiple`.
        seq_length: of these micro batches, s: a multiple of `length_multiple`.

    Returns:
        [num_micro_batches * micro_batch_size] in float64 on the CPU, in nats, the same on every rank of the replica.
    """
    reports = run_schedule(
        stages,
        batches,
        grid,
        lambda losses_bs, loss_mask_bs: (losses_bs.double() * loss_mask_bs).sum(1),
        num_micro_batches=num_micro_batches,
        micro_batch_size=micro_batch_size,
        seq_length=seq_length,
        forward_only=True,
    )
    rows = num_micro_batches * micro_batch_size
    sums = torch.cat(reports) if reports else torch.zeros(rows, dtype=torch.float64, device=grid.torch_device)
    heartbeat.tell("summing the losses")
    for group in (grid.groups.cp, grid.groups.pp):  # each has a part of the sequence; the last stage has it all
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
    return sums.cpu()


def micro_batch_multiple(stages: list[Any], grid: RankGrid) -> int:
    """What the number of micro batches must be a multiple of: the interleaved schedule takes one a stage at a time."""
    return grid.groups.pp.size() if len(stages) > 1 else 1


def length_multiple(stages: list[Any], grid: RankGrid) -> int:
    """What the length of a row must be a multiple of, so that every rank has an equal part that its products take."""
    config = stages[0].config
    context = grid.context_parallel_size
    ranks = context * (grid.groups.tp.size() if config.sequence_parallel else 1)
    if config.fp8:
        from megatron.core.fp8_utils import get_fp8_align_size

        ranks *= get_fp8_align_size(config.fp8_recipe)
    return math.lcm(ranks, 2 * context if context > 1 else 1)


@contextmanager
def evaluating(stages: list[Any]) -> Iterator[None]:
    """The stages as for evaluation, which leaves nothing in them that training would take notice of.

    FP8's `delayed` recipe notes the largest values of every forward; a training step would take its scales from those
    of the evaluation, too, which each rank has of its own, and a checkpoint of one rank alone.
    """
    newest = [history[0] for stage in stages for history in _fp8_histories(stage)]
    before = [largest.clone() for largest in newest]
    were_training = [stage.training for stage in stages]
    for stage in stages:
        stage.eval()
    try:
        yield
    finally:
        for stage, was_training in zip(stages, were_training, strict=True):
            stage.train(was_training)
        for largest, kept in zip(newest, before, strict=True):
            largest.copy_(kept)


def _fp8_histories(stage: Any) -> Iterator[Any]:
    """The past largest values, [steps, tensors], of Transformer Engine's layers; the newest first."""
    for layer in stage.modules():
        for state in getattr(layer, "fp8_meta", {}).values():
            if hasattr(state, "amax_history"):
                yield state.amax_history
