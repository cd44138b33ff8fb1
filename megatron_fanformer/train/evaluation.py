"""Evaluation in the loop: validation losses, tasks and perplexity sets. It does not change the training."""

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from megatron_fanformer.checkpoint.run_folder import VALIDATION_LOSS
from megatron_fanformer.errors import DivergenceError, InputError
from megatron_fanformer.evaluate.rows import Stopped, evaluating, row_losses
from megatron_fanformer.evaluate.scoring import perplexity_metrics, perplexity_of_sets, scores_of_tasks, task_metrics
from megatron_fanformer.evaluate.survey import EvaluationSurvey
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.train.callbacks import is_due
from megatron_fanformer.train.config import RunConfig
from megatron_fanformer.train.samples import read_batches

BITS_PER_BYTE = "bpb"  # the metric's name in `evaluate.scoring`

logger = logging.getLogger(__name__)


class Evaluation:
    """Evaluates a run's model when an evaluation is due. All ranks make the same calls together.

    Args:
        survey: the tasks and perplexity sets.
        shall_stop: returns whether any rank has a request to stop; a collective call, made before each batch.
    """

    def __init__(
        self, config: RunConfig, survey: EvaluationSurvey, grid: RankGrid, shall_stop: Callable[[], bool]
    ) -> None:
        self._config, self._survey, self._grid, self._shall_stop = config, survey, grid, shall_stop
        batch_tokens = config.evaluation.batch_tokens or config.training.micro_batch_size * config.model.seq_length
        self._scoring_options: Any = {"batch_tokens": batch_tokens, "shall_stop": shall_stop}

    def measure(self, step: int, stages: list[Any], validation_sets: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics that are due after a step. A request to stop leaves out the metrics not yet complete.

        Args:
            stages: the chunks of this rank's stage, with up-to-date weights.

        Raises:
            DivergenceError: a loss or a log-probability is not finite.
            InputError: a validation set has no learned token.
        """
        started = time.monotonic()
        is_validation_due, is_scoring_due = self._due_parts(step)
        metrics: dict[str, float] = {}
        try:
            if is_validation_due:
                for name, dataset in validation_sets.items():
                    metrics |= self._validation_loss(step, stages, name, dataset)
            if is_scoring_due and self._survey.sets:
                metrics |= self._perplexity_metrics(step, stages)
            if is_scoring_due and self._survey.tasks:
                metrics |= self._task_metrics(step, stages)
        except Stopped:
            logger.info("step %d  evaluation stopped; the rest is not measured", step)
        return {**metrics, "evaluation_seconds": time.monotonic() - started} if metrics else {}

    def is_due(self, step: int) -> bool:
        """Return whether any evaluation is due after a step."""
        return any(self._due_parts(step))

    def _due_parts(self, step: int) -> tuple[bool, bool]:
        """Return whether validation losses are due after a step, and whether tasks and perplexity sets are."""
        validation_interval = self._config.training.eval_interval
        evaluation_interval = self._config.evaluation.interval or validation_interval
        is_last = step >= self._config.training.steps
        return is_last or is_due(step, validation_interval), is_last or is_due(step, evaluation_interval)

    def _validation_loss(self, step: int, stages: list[Any], name: str, dataset: Any) -> dict[str, float]:
        iters = self._config.training.eval_iters
        loss = evaluate_loss(stages, dataset, self._grid, self._config, self._shall_stop, eval_iters=iters)
        if loss is None:
            samples = iters * self._config.training.global_batch_size
            raise InputError(
                f"validation set {name} has no learned token in the {samples:,} samples that training.eval_iters "
                f"{iters} reads; raise it, or name other data"
            )
        _check_finite(step, f"the validation loss ({name})", loss)
        logger.info("step %d  validation loss (%s) %.4f", step, name, loss)
        return {f"{VALIDATION_LOSS}/{name}": loss}

    def _perplexity_metrics(self, step: int, stages: list[Any]) -> dict[str, float]:
        results = perplexity_of_sets(stages, self._survey.sets, self._grid, **self._scoring_options)
        for name, result in results.items():
            _check_finite(step, f"the loss on {name}", result.loss)
            logger.info("step %d  %s: perplexity %.2f, loss %.4f", step, name, result.perplexity, result.loss)
        return perplexity_metrics(results)

    def _task_metrics(self, step: int, stages: list[Any]) -> dict[str, float]:
        """Return the main metric and the bits per byte of each task, under OLMo's names."""
        scores = scores_of_tasks(stages, self._survey.tasks, self._grid, every_metric=False, **self._scoring_options)
        metrics: dict[str, float] = {}
        for name, task in self._survey.tasks.items():
            values = task_metrics(task, scores[name])
            for metric in [task.metric, BITS_PER_BYTE]:  # may be the same
                if metric in values:
                    group = "downstream_bpb" if metric.startswith(BITS_PER_BYTE) else "downstream"
                    metrics[f"eval/{group}/{name}_{metric}"] = values[metric].value
            score = values[task.metric]
            logger.info(
                "step %d  %s: %s %.4f ± %.4f over %d documents",
                *(step, name, task.metric, score.value, score.standard_error, score.documents),
            )
        return metrics


def _check_finite(step: int, name: str, value: float) -> None:
    if not math.isfinite(value):
        raise DivergenceError(
            f"step {step}: {name} is {value}; start again to go on from the last checkpoint, with a lower optimizer.lr "
            "if it happens again"
        )


def evaluate_loss(
    stages: list[Any],
    dataset: Any,
    grid: RankGrid,
    config: RunConfig,
    shall_stop: Callable[[], bool] = lambda: False,
    *,
    eval_iters: int,
) -> float | None:
    """Return the mean loss per token, in nats, over the first `eval_iters` global batches; None if no token has a loss.

    Raises:
        Stopped: `shall_stop` returned True before a batch.
    """
    size, num_micro_batches = config.training.micro_batch_size, config.num_micro_batches(grid.data_parallel_size)
    stream = read_batches(config, grid, dataset, consumed_samples=0)
    sums = torch.zeros(2, dtype=torch.float64)  # of losses, of tokens
    with evaluating(stages):
        for _ in range(eval_iters):
            if shall_stop():
                raise Stopped
            batches = list(itertools.islice(stream, num_micro_batches))
            losses = row_losses(stages, iter(batches), grid, num_micro_batches=num_micro_batches, micro_batch_size=size)
            tokens = sum(int(batch["loss_mask"].sum()) for batch in batches)
            sums += torch.tensor([losses.sum().item(), tokens], dtype=torch.float64)
    sums = sums.to(grid.torch_device)
    dist.all_reduce(sums, group=grid.groups.dp)  # the ranks of one replica have equal sums
    loss, num_tokens = sums.tolist()
    return float(loss / num_tokens) if num_tokens else None
