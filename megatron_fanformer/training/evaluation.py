"""The mean loss over a validation set, the same samples every time."""

import itertools
from typing import Any

import torch
import torch.distributed as dist

from megatron_fanformer.data.batches import micro_batches
from megatron_fanformer.evaluation.forward import evaluating, row_losses
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.training.step import StepShape


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
    loss_and_tokens = torch.zeros(2, dtype=torch.float64)
    with evaluating(stages):
        for _ in range(eval_iters):
            taken = list(itertools.islice(batches, shape.num_micro_batches))
            losses = row_losses(
                stages,
                iter(taken),
                grid,
                num_micro_batches=shape.num_micro_batches,
                micro_batch_size=shape.micro_batch_size,
                seq_length=shape.seq_length,
            )
            tokens = sum(batch["loss_mask"].sum() for batch in taken)
            loss_and_tokens += torch.tensor([losses.sum(), tokens], dtype=torch.float64)
    sums = loss_and_tokens.to(grid.torch_device)
    dist.all_reduce(sums, group=grid.groups.dp)
    loss, count = sums.tolist()
    return float(loss / max(count, 1))
