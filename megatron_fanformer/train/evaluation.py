"""Evaluation in the loop: the loss on validation sets, tasks and perplexity sets; training goes on as without it."""

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_fanformer.checkpoint.run_folder import VALIDATION_LOSS
from megatron_fanformer.errors import DivergenceError, InputError
from megatron_fanformer.evaluate.perplexity_sets import PerplexitySet
from megatron_fanformer.evaluate.requests import TaskRequests
from megatron_fanformer.evaluate.results import MetricValue, SetResult
from megatron_fanformer.evaluate.rows import Stopped, evaluating, row_losses
from megatron_fanformer.evaluate.scoring import (
    perplexity_metrics,
    perplexity_of_sets,
    scores_of_tasks,
    task_metrics,
)
from megatron_fanformer.evaluate.survey import EvaluationSurvey
from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.train.callbacks import is_due
from megatron_fanformer.train.config import RunConfig
from megatron_fanformer.train.samples import read_batches

BITS_PER_BYTE = "bpb"  # by its name in `evaluate.scoring`

logger = logging.getLogger(__name__)


class Evaluation:
    """Evaluates a run's model at the steps that are due; every rank has one.

    Args:
        survey: the tasks and the perplexity sets.
        shall_stop: returns whether any rank has a request to stop, the same on all; a collective call.
    """

    def __init__(
        self, config: RunConfig, survey: EvaluationSurvey, grid: RankGrid, *, shall_stop: Callable[[], bool]
    ) -> None:
        self._config, self._survey, self._grid, self._shall_stop = config, survey, grid, shall_stop
        self._started, self._seconds = time.monotonic(), 0.0
        self.was_stopped = False  # the latest one

    def metrics(self, step: int, stages: list[Any], valid: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics that are due after a step; where it is stopped, those that were whole by then.

        Args:
            stages: the chunks of this rank's stage, their weights up to date.
            valid: the validation sets by name.

        Raises:
            DivergenceError: a loss or a log-probability is not finite.
            InputError: a validation set has no learned token.
        """
        started = time.monotonic()
        metrics: dict[str, float] = {}
        self.was_stopped = False
        due = self._due(step, stages, valid)
        for number, (_, measure) in enumerate(due):
            try:
                metrics |= measure()
            except Stopped:
                self.was_stopped = True
                left = ", ".join(name for name, _ in due[number:])
                logger.info("step %d  evaluation stopped; not measured, and not logged: %s", step, left)
                break
        if not metrics:
            return {}
        seconds = time.monotonic() - started
        self._seconds += seconds
        share = self._seconds / (time.monotonic() - self._started)
        return {**metrics, "evaluation_seconds": seconds, "evaluation_share": share}

    def is_due(self, step: int) -> bool:
        """Return whether anything is measured after a step."""
        return any(self._intervals_due(step))

    def _intervals_due(self, step: int) -> tuple[bool, bool]:
        """Return whether validation sets are due after a step, and whether tasks and perplexity sets are."""
        validation_interval = self._config.training.eval_interval
        intervals = (validation_interval, self._config.evaluation.interval or validation_interval)
        is_last = step >= self._config.training.steps
        validates, evaluates = (is_last or is_due(step, interval) for interval in intervals)
        return validates, evaluates

    def _due(
        self, step: int, stages: list[Any], valid: Mapping[str, Any]
    ) -> list[tuple[str, Callable[[], dict[str, float]]]]:
        """Return the name and the call of each measurement after a step, in order, the same on all ranks."""
        due: list[tuple[str, Callable[[], dict[str, float]]]] = []
        validates, evaluates = self._intervals_due(step)
        if validates:
            for name, dataset in valid.items():
                due.append((f"validation loss ({name})", partial(self._validation_loss, step, stages, name, dataset)))
        if evaluates:
            losses: dict[str, SetResult] = {}
            for perplexity_set in self._survey.sets:
                measure = partial(self._perplexity_metrics, step, stages, perplexity_set, losses)
                due.append((perplexity_set.name, measure))
            if self._survey.tasks:
                due.append((f"tasks ({', '.join(self._survey.tasks)})", partial(self._task_metrics, step, stages)))
        return due

    def _validation_loss(self, step: int, stages: list[Any], name: str, dataset: Any) -> dict[str, float]:
        iters = self._config.training.eval_iters
        loss = evaluate_loss(stages, dataset, self._grid, self._config, eval_iters=iters, shall_stop=self._shall_stop)
        if loss is None:
            samples = iters * self._config.training.global_batch_size
            raise InputError(
                f"validation set {name} has no learned token in the {samples:,} samples that training.eval_iters "
                f"{iters} reads; raise it, or name other data"
            )
        _refuse_not_finite(step, f"the validation loss ({name})", loss)
        logger.info("step %d  validation loss (%s) %.4f", step, name, loss)
        return {f"{VALIDATION_LOSS}/{name}": loss}

    def _perplexity_metrics(
        self, step: int, stages: list[Any], perplexity_set: PerplexitySet, losses: dict[str, SetResult]
    ) -> dict[str, float]:
        """Return the metrics of all sets so far, with losses in `losses`; a group's mean comes with its last set."""
        losses |= perplexity_of_sets(
            stages,
            [perplexity_set],
            self._grid,
            batch_tokens=self._config.evaluation_batch_tokens,
            shall_stop=self._shall_stop,
        )
        name, result = perplexity_set.name, losses[perplexity_set.name]
        _refuse_not_finite(step, f"the loss on {name}", result.loss)
        logger.info("step %d  %s: perplexity %.2f, loss %.4f", step, name, result.perplexity, result.loss)
        return perplexity_metrics(losses)

    def _task_metrics(self, step: int, stages: list[Any]) -> dict[str, float]:
        tasks = self._survey.tasks
        scores = scores_of_tasks(
            stages,
            tasks,
            self._grid,
            batch_tokens=self._config.evaluation_batch_tokens,
            every_metric=False,
            shall_stop=self._shall_stop,
        )
        metrics: dict[str, float] = {}
        for name, task in tasks.items():
            values = task_metrics(task, scores[name])
            metrics |= downstream_metrics(task, values)
            best = values[task.metric]
            logger.info(
                "step %d  %s: %s %.4f ± %.4f over %d documents",
                *(step, name, task.metric, best.value, best.standard_error, best.documents),
            )
        return metrics


def downstream_metrics(task: TaskRequests, values: Mapping[str, MetricValue]) -> dict[str, float]:
    """Return a task's metrics for the log, by OLMo's names: its own, and bits per byte where that is another."""
    metrics = {}
    for metric in dict.fromkeys((task.metric, BITS_PER_BYTE)):
        if metric in values:
            place = "downstream_bpb" if metric.startswith(BITS_PER_BYTE) else "downstream"
            metrics[f"eval/{place}/{task.name}_{metric}"] = values[metric].value
    return metrics


def _refuse_not_finite(step: int, what: str, value: float) -> None:
    if not math.isfinite(value):
        raise DivergenceError(
            f"step {step}: {what} is {value}; start again to go on from the last checkpoint, with a lower optimizer.lr "
            "if it happens again"
        )


def evaluate_loss(
    stages: list[Any],
    dataset: Any,
    grid: RankGrid,
    config: RunConfig,
    *,
    eval_iters: int,
    shall_stop: Callable[[], bool] | None = None,
) -> float | None:
    """Mean cross entropy per token, in nats, over the first `eval_iters` global batches of a dataset; None without
    tokens.

    Raises:
        Stopped: `shall_stop`, which is called before each global batch, returned true.
    """
    size, number = config.training.micro_batch_size, config.num_micro_batches(grid.data_parallel_size)
    batches = read_batches(config, grid, dataset, consumed_samples=0)
    sums = torch.zeros(2, dtype=torch.float64)  # of losses, of tokens
    with evaluating(stages):
        for _ in range(eval_iters):
            if shall_stop is not None and shall_stop():
                raise Stopped
            taken = list(itertools.islice(batches, number))
            losses = row_losses(stages, iter(taken), grid, num_micro_batches=number, micro_batch_size=size)
            tokens = sum(int(batch["loss_mask"].sum()) for batch in taken)
            sums += torch.tensor([losses.sum().item(), tokens], dtype=torch.float64)
    sums = sums.to(grid.torch_device)
    dist.all_reduce(sums, group=grid.groups.dp)
    loss, count = sums.tolist()
    return float(loss / count) if count else None
