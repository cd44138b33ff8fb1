"""The mean loss over a validation set, the same samples every time."""

import itertools
from typing import Any

from megatron_fanformer.data.batches import micro_batches
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.training.step import evaluation_step


def evaluate_loss(
    stage: Any,
    dataset: Any,
    grid: RankGrid,
    *,
    eval_iters: int,
    num_micro_batches: int,
    micro_batch_size: int,
    seq_length: int,
) -> float:
    """Mean cross entropy a token, in nats, over the first `eval_iters` global batches of a dataset."""
    batches = micro_batches(
        dataset,
        consumed_samples=0,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=grid.data_parallel_rank,
        data_parallel_size=grid.data_parallel_size,
    )
    stage.eval()
    loss_sum, tokens = 0.0, 0
    for _ in range(eval_iters):
        loss, count = evaluation_step(
            [stage],
            itertools.islice(batches, num_micro_batches),
            grid,
            num_micro_batches=num_micro_batches,
            micro_batch_size=micro_batch_size,
            seq_length=seq_length,
        )
        loss_sum, tokens = loss_sum + loss * count, tokens + count
    stage.train()
    return loss_sum / max(tokens, 1)
