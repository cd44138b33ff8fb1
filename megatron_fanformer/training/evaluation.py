"""The mean loss over a validation set, the same samples every time."""

from typing import Any

from megatron_fanformer.data.batches import micro_batches
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.training.step import StepShape, evaluation_step


def evaluate_loss(
    stages: list[Any],
    dataset: Any,
    grid: RankGrid,
    shape: StepShape,
    *,
    eval_iters: int,
) -> float:
    """Mean cross entropy per token, in nats, over the first `eval_iters` global batches of a dataset."""
    batches = micro_batches(
        dataset,
        consumed_samples=0,
        micro_batch_size=shape.micro_batch_size,
        data_parallel_rank=grid.data_parallel_rank,
        data_parallel_size=grid.data_parallel_size,
    )
    for stage in stages:
        stage.eval()
    loss_sum, tokens = 0.0, 0
    for _ in range(eval_iters):
        loss, count = evaluation_step(stages, batches, grid, shape)
        loss_sum, tokens = loss_sum + loss * count, tokens + count
    for stage in stages:
        stage.train()
    return loss_sum / max(tokens, 1)
