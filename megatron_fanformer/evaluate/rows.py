"""Computes the sum of losses of each row, in any layout, for every kind of evaluation; rows are batched by length.

All replicas take the same number of batches of the same shapes; the last batch may have empty rows. So no replica waits
for another, and all can stop after the same batch.

Shapes: m micro batches, b rows of a micro batch, s sequence.
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
from megatron_fanformer.data.remote_files import map_in_threads
from megatron_fanformer.runtime.device import return_freed_memory
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.runtime.pipeline import Batches, run_schedule

MICRO_BATCHES_PER_STAGE = 4  # in a forward pass; two pipeline stages then idle a ninth of the time
# The number of padded lengths between a power of two and the next: at most an eighth of a row is padding. More lengths
# would need less padding, but attention on a GPU is planned anew for every shape.
LENGTHS_PER_OCTAVE = 8
TRIM_INTERVAL = 8  # batches, after which the memory freed by tensors of other lengths is returned to the system
EMPTY = -1  # in place of a row's number, where a batch has fewer rows than its shape

ReadRow = Callable[[int], np.ndarray]


@torch.no_grad()
def row_losses(
    stages: list[Any], batches: Batches, grid: RankGrid, *, num_micro_batches: int, micro_batch_size: int
) -> Tensor:
    """Return the losses of the next micro batches, summed by row over the loss mask; a collective call of one replica.

    Args:
        stages: the chunks of this rank's stage, within `evaluating`; megatron-core's data parallelism may wrap them.
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
    for group in (grid.groups.cp, grid.groups.pp):  # context ranks have parts of rows; only the last stage has losses
        if group.size() > 1:
            dist.all_reduce(sums, group=group)
    return sums.cpu()


def micro_batch_multiple(stages: list[Any], grid: RankGrid) -> int:
    """Return the divisor of the number of micro batches: an interleaved schedule takes one per stage at a time."""
    return grid.groups.pp.size() if len(stages) > 1 else 1  # a rank has several chunks only if it interleaves them


def length_multiple(stages: list[Any], grid: RankGrid) -> int:
    """Return the divisor of padded lengths: ranks get equal parts of a row, and with FP8 parts of an aligned size."""
    config, context = stages[0].config, grid.context_parallel_size
    multiple = context * (grid.groups.tp.size() if config.sequence_parallel else 1)  # the number of parts
    if config.fp8:
        from megatron.core.fp8_utils import get_fp8_align_size

        multiple *= get_fp8_align_size(config.fp8_recipe)
    return math.lcm(multiple, 2 * context) if context > 1 else multiple  # each context rank gets two equal pieces


@contextmanager
def evaluating(stages: list[Any]) -> Iterator[None]:
    """Put the stages into evaluation mode; at the end restore their modes and the newest records of FP8's scaling.

    FP8's `delayed` recipe records the largest values of every forward pass, and derives a training step's scales from
    them. The values of an evaluation differ from rank to rank, and a checkpoint would store those of one rank.
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
    """Yield the largest values that Transformer Engine's layers recorded: [steps, tensors], the newest step first."""
    for layer in stage.modules():
        for state in getattr(layer, "fp8_meta", {}).values():
            if hasattr(state, "amax_history"):
                yield state.amax_history


# -- rows of any lengths


class Stopped(Exception):
    """Raised when `shall_stop` stops an evaluation."""


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
    """Return the sum of the losses of each row's last ids, in nats; a collective call.

    Args:
        stages: the chunks of this rank's stage; megatron-core's data parallelism may wrap them.
        lengths: [n] the number of ids in each row, at least 2. The model's input is all ids but the last.
        read: returns the ids of a row, [length of the row], by the row's number.
        batch_tokens: about how many tokens a micro batch has; at least one row.
        scored: [n] the number of last ids in each row whose losses are summed; None: all ids but the first.
        shall_stop: called before each batch, equally often on every rank; must return the same on all ranks.

    Returns:
        [n] float64, in the rows' order, the same on every rank.

    Raises:
        Stopped: `shall_stop` returned true; raised on every rank.
    """
    scored = lengths - 1 if scored is None else scored
    losses = np.zeros(len(lengths))
    with evaluating(stages):
        for number, batch in enumerate(batches_of_rows(lengths, stages, grid, batch_tokens), 1):
            if shall_stop is not None and shall_stop():
                raise Stopped
            if number % TRIM_INTERVAL == 0:
                return_freed_memory()
            rows_mb = batch.rows[grid.data_parallel_rank]
            sums = row_losses(
                stages,
                shared_batches(
                    partial(_micro_batches, rows_mb, read, scored, batch.seq_length),
                    grid.samples_group,
                    micro_batch_size=rows_mb.shape[1],
                    seq_length=batch.seq_length,
                ),
                grid,
                num_micro_batches=rows_mb.shape[0],
                micro_batch_size=rows_mb.shape[1],
            )
            is_row = rows_mb.flatten() != EMPTY
            losses[rows_mb.flatten()[is_row]] = sums.numpy()[is_row]
    if grid.data_parallel_size == 1:
        return losses
    total = torch.from_numpy(losses).to(grid.torch_device)  # a replica has its own rows' losses, and 0 elsewhere
    dist.all_reduce(total, group=grid.groups.dp)
    return np.asarray(total.cpu())


@dataclass(frozen=True, kw_only=True)
class RowBatch:
    """The rows that all replicas take in one batch."""

    rows: np.ndarray
    """[replicas, m, b]: the numbers of the rows; EMPTY at the end of a batch that has fewer rows."""
    seq_length: int


def batches_of_rows(lengths: np.ndarray, stages: list[Any], grid: RankGrid, batch_tokens: int) -> Iterator[RowBatch]:
    """Yield all rows in batches of similar lengths, the longest first, so that a lack of memory shows at once."""
    pipeline_stages, replicas = grid.groups.pp.size(), grid.data_parallel_size
    most_micro_batches = MICRO_BATCHES_PER_STAGE * pipeline_stages if pipeline_stages > 1 else 1
    micro_batch_unit, length_unit = micro_batch_multiple(stages, grid), length_multiple(stages, grid)
    remaining = np.argsort(-lengths, kind="stable")
    while len(remaining):
        seq_length = padded_length(int(lengths[remaining[0]]) - 1, length_unit)
        rows_per_replica = math.ceil(len(remaining) / replicas)
        m = _round_up(min(most_micro_batches, rows_per_replica), micro_batch_unit)
        b = min(max(1, batch_tokens // seq_length), math.ceil(rows_per_replica / m))
        taken, remaining = np.split(remaining, [min(replicas * m * b, len(remaining))])
        rows = np.full(m * b * replicas, EMPTY)
        rows[: len(taken)] = taken
        by_replica = rows.reshape(m * b, replicas).T  # every replica gets each replicas-th row: similar lengths
        yield RowBatch(rows=by_replica.reshape(replicas, m, b), seq_length=seq_length)


def padded_length(length: int, unit: int) -> int:
    """Return the length to which rows of up to `length` tokens are padded: one of a few multiples of `unit`."""
    octave = 1 << (length.bit_length() - 1)  # the largest power of two up to `length`
    return _round_up(length, math.lcm(unit, max(8, octave // LENGTHS_PER_OCTAVE)))  # in steps of 8 tokens or more


def _micro_batches(
    rows_mb: np.ndarray, read: ReadRow, scored: np.ndarray, seq_length: int
) -> Generator[dict[str, Tensor], None, None]:
    """Yield m micro batches [b, s] of the rows whose numbers are in `rows_mb` [m, b].

    All ids of a row but the last are tokens; a token's label is the next id. The last `scored[row]` labels count.
    """
    for rows in rows_mb:
        tokens = np.zeros((len(rows), seq_length), dtype=np.int64)
        labels, loss_mask = np.zeros_like(tokens), np.zeros(tokens.shape, dtype=np.float32)
        present = rows[rows != EMPTY].tolist()
        for position, (row, ids) in enumerate(zip(present, map_in_threads(read, present), strict=True)):
            end = len(ids) - 1
            tokens[position, :end], labels[position, :end] = ids[:-1], ids[1:]
            loss_mask[position, end - scored[row] : end] = 1
        yield {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.arange(seq_length).expand(len(rows), -1).contiguous(),
        }


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
