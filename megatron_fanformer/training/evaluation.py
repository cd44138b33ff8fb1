"""The mean loss over a validation set, the same samples every time."""

from collections.abc import Iterator
from contextlib import contextmanager
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
    loss_sum, tokens = 0.0, 0
    with _evaluating(stages):
        for _ in range(eval_iters):
            loss, count = evaluation_step(stages, batches, grid, shape)
            loss_sum, tokens = loss_sum + loss * count, tokens + count
    return loss_sum / max(tokens, 1)


@contextmanager
def _evaluating(stages: list[Any]) -> Iterator[None]:
    """The stages as for evaluation, which leaves nothing in them that training would take notice of.

    FP8's `delayed` recipe notes the largest values of every forward; a training step would take its scales from those
    of the evaluation, too, which each rank has of its own, and a checkpoint of one rank alone.
    """
    newest = [history[0] for stage in stages for history in _fp8_histories(stage)]
    before = [largest.clone() for largest in newest]
    for stage in stages:
        stage.eval()
    yield
    for stage in stages:
        stage.train()
    for largest, kept in zip(newest, before, strict=True):
        largest.copy_(kept)


def _fp8_histories(stage: Any) -> Iterator[Any]:
    """The past largest values, [steps, tensors], of Transformer Engine's layers; the newest first."""
    for layer in stage.modules():
        for state in getattr(layer, "fp8_meta", {}).values():
            if hasattr(state, "amax_history"):
                yield state.amax_history
