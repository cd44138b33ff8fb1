"""The loss of perplexity sets, in any layout: rows are spread over the replicas, and nothing else is exchanged.

A set's loss is the mean over its scored tokens. By the paper's chunking all chunks have as many, so that it is the mean
of the chunks' losses, too. The paper's mean over a group is that of perplexities, not exp of the mean loss.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fanformer.evaluation.forward import evaluating, length_multiple, micro_batch_multiple, row_losses
from megatron_fanformer.evaluation.perplexity_config import Group
from megatron_fanformer.evaluation.perplexity_sets import SETS, PerplexitySet, set_name
from megatron_fanformer.runtime.parallel import RankGrid

BATCHES_A_STAGE = 4  # micro batches that a pipeline stage takes at a time: it waits for three of seven at two stages


@dataclass(frozen=True, kw_only=True)
class SetLoss:
    """What a model makes of a set."""

    loss: float
    """Mean cross entropy of a scored token, in nats."""
    tokens: int
    """Scored ones."""
    bits_per_byte: float | None
    """Of the text; None where its bytes are not known."""

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond a float."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def perplexity_of_sets(
    stages: list[Any],
    sets: Sequence[PerplexitySet],
    grid: RankGrid,
    *,
    batch_tokens: int,
    shall_stop: Callable[[], bool] | None = None,
) -> dict[str, SetLoss] | None:
    """The loss of each set, by its name, the same on every rank; a collective call.

    Args:
        stages: the chunks of this rank's stage, in megatron-core's data parallelism or without.
        batch_tokens: about how many tokens a micro batch has.
        shall_stop: asked before each batch, on every rank equally often; its answer must be the same on all.

    Returns:
        None where it was stopped.

    Raises:
        CorruptError: a file has become shorter since it was found.
    """
    found: dict[str, SetLoss] = {}
    with evaluating(stages):
        for each in sets:
            loss = _loss_of(stages, each, grid, batch_tokens, shall_stop)
            if loss is None:
                return None
            found[each.name] = loss
    return found


def group_perplexities(losses: Mapping[str, SetLoss]) -> dict[Group, float]:
    """The mean perplexity of each of the paper's groups whose sets are all there."""
    return {
        group: float(np.mean([losses[set_name(group, name)].perplexity for name in names]))
        for group, names in SETS.items()
        if all(set_name(group, name) in losses for name in names)
    }


def perplexity_metrics(losses: Mapping[str, SetLoss]) -> dict[str, float]:
    """What a run logs of the sets, by OLMo's names."""
    metrics: dict[str, float] = {}
    for name, found in losses.items():
        metrics[f"eval/{name}/CrossEntropyLoss"] = found.loss
        metrics[f"eval/{name}/Perplexity"] = found.perplexity
        if found.bits_per_byte is not None:
            metrics[f"eval/{name}/BitsPerByte"] = found.bits_per_byte
    return {**metrics, **{f"eval/{group}/Perplexity": mean for group, mean in group_perplexities(losses).items()}}


def _loss_of(
    stages: list[Any],
    found: PerplexitySet,
    grid: RankGrid,
    batch_tokens: int,
    shall_stop: Callable[[], bool] | None,
) -> SetLoss | None:
    total = 0.0
    pieces = found.pieces()
    for batch in _batches(pieces, stages, grid, batch_tokens):
        if shall_stop is not None and shall_stop():
            return None
        losses = row_losses(
            stages,
            batch.micro_batches(found, grid.data_parallel_rank),
            grid,
            num_micro_batches=batch.num_micro_batches,
            micro_batch_size=batch.micro_batch_size,
            seq_length=batch.seq_length,
        )
        total += float(losses.sum())
    summed = torch.tensor(total, dtype=torch.float64, device=grid.torch_device)
    dist.all_reduce(summed, group=grid.groups.dp)
    tokens = int((pieces[:, 2] - 1).sum())
    loss = summed.item() / tokens
    bits = None if found.bytes_per_token is None else loss / math.log(2) / found.bytes_per_token
    return SetLoss(loss=loss, tokens=tokens, bits_per_byte=bits)


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """What all replicas score at a time."""

    pieces: np.ndarray
    """[at most the rows of all replicas, 3], as `PerplexitySet.pieces`; rows beyond them are empty."""
    num_micro_batches: int
    micro_batch_size: int
    seq_length: int

    def micro_batches(self, found: PerplexitySet, replica: int) -> Iterator[dict[str, Tensor]]:
        """Those of one replica, [b, s] each of `data.batches.BATCH_FIELDS`."""
        size, first = self.micro_batch_size, replica * self.num_micro_batches * self.micro_batch_size
        for begin in range(first, first + self.num_micro_batches * size, size):
            yield _micro_batch(
                [found.read(piece) for piece in self.pieces[begin : begin + size]], size, self.seq_length
            )


def _batches(pieces: np.ndarray, stages: list[Any], grid: RankGrid, batch_tokens: int) -> Iterator[_Batch]:
    """The longest first: rows of a batch are of about the same length, and too little memory shows at once."""
    pieces = pieces[np.argsort(-pieces[:, 2], kind="stable")]
    length_unit, count_unit = length_multiple(stages, grid), micro_batch_multiple(stages, grid)
    pipeline_stages = grid.groups.pp.size()
    most_batches = BATCHES_A_STAGE * pipeline_stages if pipeline_stages > 1 else 1
    while len(pieces):
        seq_length = _rounded_up(int(pieces[0, 2]), length_unit)
        size = max(1, batch_tokens // seq_length)
        wanted = math.ceil(len(pieces) / (size * grid.data_parallel_size))
        count = _rounded_up(min(wanted, most_batches), count_unit)
        taken = count * size * grid.data_parallel_size
        yield _Batch(pieces=pieces[:taken], num_micro_batches=count, micro_batch_size=size, seq_length=seq_length)
        pieces = pieces[taken:]


def _rounded_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _micro_batch(rows: Sequence[np.ndarray], size: int, seq_length: int) -> dict[str, Tensor]:
    """Rows of ids as tokens, each with the one that follows it as its label; what has none is masked."""
    tokens = np.zeros((size, seq_length), dtype=np.int64)
    labels, loss_mask = np.zeros_like(tokens), np.zeros(tokens.shape, dtype=np.float32)
    for number, ids in enumerate(rows):
        tokens[number, : len(ids)] = ids
        labels[number, : len(ids) - 1] = ids[1:]
        loss_mask[number, : len(ids) - 1] = 1
    return {
        "tokens": torch.from_numpy(tokens),
        "labels": torch.from_numpy(labels),
        "loss_mask": torch.from_numpy(loss_mask),
        "position_ids": torch.arange(seq_length).expand(size, seq_length).contiguous(),
    }
