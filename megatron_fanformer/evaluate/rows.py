"""Losses summed by row, in any layout, which every evaluation is made of; rows of any lengths, batched by length.

All replicas take the same number of batches of the same shapes, the last of which may have empty rows. So none waits
for another, and all can be stopped at the same point.

Shapes: b micro batch, s sequence.
"""

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fanformer.data.batches import shared_batches
from megatron_fanformer.data.remote_files import side_by_side
from megatron_fanformer.runtime.device import return_freed_memory
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.runtime.pipeline import Batches, run_schedule

MICRO_BATCHES_A_STAGE = 4  # per pass of a pipeline: two stages then idle a ninth of it
LENGTHS_AN_OCTAVE = (
    8  # padded lengths of rows, an eighth of padding at most: a GPU's attention plans anew for every shape
)
TRIM_INTERVAL = 8  # batches, after which memory of other lengths' tensors is returned
EMPTY = -1

ReadRow = Callable[[int], np.ndarray]


@torch.no_grad()
def row_losses(
    stages: list[Any],
    batches: Batches,
    grid: RankGrid,
    *,
    num_micro_batches: int,
    micro_batch_size: int,
) -> Tensor:
    """Return the next micro batches' losses, summed over the loss mask, by row; a collective call of one replica.

    Args:
        stages: the chunks of this rank's stage, in megatron-core's data parallelism or without; `evaluating` them.
        batches: this replica's micro batches, [b, s] each of `data.batches.BATCH_FIELDS`, on the CPU, where s is a
            multiple of `length_multiple`.
        num_micro_batches: a multiple of `micro_batch_multiple`.

    Returns:
        [num_micro_batches * micro_batch_size] in float64 on the CPU, in nats, the same on every rank of the replica.
    """
    reports = run_schedule(
        stages,
        batches,
        grid,
        lambda losses_bs, loss_mask_bs: (losses_bs.double() * loss_mask_bs).sum(1),
        num_micro_batches=num_micro_batches,
        forward_only=True,
    )
    rows = num_micro_batches * micro_batch_size
    sums = torch.cat(reports) if reports else torch.zeros(rows, dtype=torch.float64, device=grid.torch_device)
    for group in (grid.groups.cp, grid.groups.pp):  # each has a part of the sequence; the last stage has it all
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
    return sums.cpu()


def micro_batch_multiple(stages: list[Any], grid: RankGrid) -> int:
    """Return the factor of the number of micro batches: the interleaved schedule takes one a stage at a time."""
    return grid.groups.pp.size() if len(stages) > 1 else 1


def length_multiple(stages: list[Any], grid: RankGrid) -> int:
    """Return the factor of a row's length that gives every rank an equal part, of a size that its products take."""
    config = stages[0].config
    context = grid.context_parallel_size
    ranks = context * (grid.groups.tp.size() if config.sequence_parallel else 1)
    if config.fp8:
        from megatron.core.fp8_utils import get_fp8_align_size

        ranks *= get_fp8_align_size(config.fp8_recipe)
    return math.lcm(ranks, 2 * context if context > 1 else 1)


@contextmanager
def evaluating(stages: list[Any]) -> Iterator[None]:
    """Put the stages into evaluation, leaving nothing in them that training would notice.

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
    """Yield the past largest values, [steps, tensors], of Transformer Engine's layers; the newest first."""
    for layer in stage.modules():
        for state in getattr(layer, "fp8_meta", {}).values():
            if hasattr(state, "amax_history"):
                yield state.amax_history


# -- rows of any lengths


class Stopped(Exception):
    """An evaluation that `shall_stop` has stopped."""


def losses_of_rows(
    stages: list[Any],
    lengths: np.ndarray,
    read: ReadRow,
    grid: RankGrid,
    *,
    batch_tokens: int,
    scored: np.ndarray | None = None,
    shall_stop: Callable[[], bool] | None = None,
) -> np.ndarray:
    """Return each row's sum of the losses of its last ids, in nats; a collective call.

    Args:
        stages: the chunks of this rank's stage, in megatron-core's data parallelism or without.
        lengths: [n] how many ids each row has, at least 2. The model is given all but the last.
        read: the ids of a row, by its number, [its length].
        batch_tokens: about how many tokens a micro batch has: one row at the least.
        scored: [n] of how many of a row's last ids the losses are summed; None: of all but its first.
        shall_stop: called before each batch, on every rank equally often; it must return the same on all.

    Returns:
        [n] float64, in the rows' order, the same on every rank.

    Raises:
        Stopped: on every rank, as `shall_stop` said.
    """
    scored = lengths - 1 if scored is None else scored
    losses = np.zeros(len(lengths))
    with evaluating(stages):
        for number, batch in enumerate(batches_of_rows(lengths, stages, grid, batch_tokens), 1):
            if shall_stop is not None and shall_stop():
                raise Stopped
            if number % TRIM_INTERVAL == 0:
                return_freed_memory()
            own_mb = batch.rows[grid.data_parallel_rank]
            sums = row_losses(
                stages,
                shared_batches(
                    partial(_micro_batches, own_mb, read, scored, batch.seq_length),
                    grid.samples_group,
                    micro_batch_size=own_mb.shape[1],
                    seq_length=batch.seq_length,
                ),
                grid,
                num_micro_batches=own_mb.shape[0],
                micro_batch_size=own_mb.shape[1],
            )
            is_row = own_mb.flatten() != EMPTY
            losses[own_mb.flatten()[is_row]] = sums.numpy()[is_row]
    if grid.data_parallel_size == 1:
        return losses
    whole = torch.from_numpy(losses).to(grid.torch_device)  # of each replica its own rows, and 0 elsewhere
    dist.all_reduce(whole, group=grid.groups.dp)
    return np.asarray(whole.cpu())


@dataclass(frozen=True, kw_only=True)
class RowBatch:
    """The rows that all replicas take in one batch."""

    rows: np.ndarray
    """[replicas, micro batches, b]: the numbers of the rows; EMPTY, in the end, where there is none."""
    seq_length: int


def batches_of_rows(lengths: np.ndarray, stages: list[Any], grid: RankGrid, batch_tokens: int) -> Iterator[RowBatch]:
    """Return all rows, the longest first: a batch's are of about one length, and too little memory shows at once."""
    pipeline_stages, replicas = grid.groups.pp.size(), grid.data_parallel_size
    most_micro_batches = MICRO_BATCHES_A_STAGE * pipeline_stages if pipeline_stages > 1 else 1
    count_unit, length_unit = micro_batch_multiple(stages, grid), length_multiple(stages, grid)
    left = np.argsort(-lengths, kind="stable")
    while len(left):
        seq_length = padded_length(int(lengths[left[0]]) - 1, length_unit)
        most = math.ceil(len(left) / replicas)  # rows of a replica
        count = _rounded_up(min(most_micro_batches, most), count_unit)
        size = min(max(1, batch_tokens // seq_length), math.ceil(most / count))
        taken, left = np.split(left, [min(replicas * count * size, len(left))])
        rows = np.full(count * size * replicas, EMPTY)
        rows[: len(taken)] = taken
        dealt = rows.reshape(count * size, replicas).T  # in turns: replicas have equal lengths, too
        yield RowBatch(rows=dealt.reshape(replicas, count, size), seq_length=seq_length)


def padded_length(length: int, unit: int) -> int:
    """Return the length that rows of up to `length` tokens are padded to: a multiple of `unit`, of few different
    ones.
    """
    octave = 1 << (length.bit_length() - 1)
    return _rounded_up(length, math.lcm(unit, max(8, octave // LENGTHS_AN_OCTAVE)))


def _micro_batches(
    rows_mb: np.ndarray, read: ReadRow, scored: np.ndarray, seq_length: int
) -> Generator[dict[str, Tensor], None, None]:
    """Yield micro batches [b, s] of the rows numbered in `rows_mb` [micro batches, b].

    All ids of a row but the last are tokens; a token's label is the next id. The last `scored[row]` labels count.
    """
    for rows in rows_mb:
        tokens = np.zeros((len(rows), seq_length), dtype=np.int64)
        labels, loss_mask = np.zeros_like(tokens), np.zeros(tokens.shape, dtype=np.float32)
        present = rows[rows != EMPTY].tolist()
        for position, (row, ids) in enumerate(zip(present, side_by_side(read, present), strict=True)):
            end = len(ids) - 1
            tokens[position, :end], labels[position, :end] = ids[:-1], ids[1:]
            loss_mask[position, end - scored[row] : end] = 1
        yield {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.arange(seq_length).expand(len(rows), -1).contiguous(),
        }


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
