"""Evaluation in the loop: the loss on validation sets, tasks and perplexity sets.

It leaves nothing behind that training would take notice of. One that a signal stops keeps what was whole by then.
"""

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_fanformer.checkpoint.run_folder import VALIDATION_LOSS
from megatron_fanformer.errors import DivergenceError, InputError
from megatron_fanformer.evaluate.perplexity import SetLoss, perplexity_metrics, perplexity_of_sets
from megatron_fanformer.evaluate.perplexity_sets import PerplexitySet
from megatron_fanformer.evaluate.requests import TaskRequests
from megatron_fanformer.evaluate.results import MetricValue
from megatron_fanformer.evaluate.rows import Stopped, evaluating, row_losses
from megatron_fanformer.evaluate.scoring import scores_of_tasks, task_metrics
from megatron_fanformer.evaluate.survey import EvaluationSurvey
from megatron_fanformer.runtime.parallel import RankGrid
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
        self._batch_tokens = config.evaluation_batch_tokens
        self._validation_interval = config.training.eval_interval
        self._interval = config.evaluation.interval or config.training.eval_interval
        self._last_step = config.training.steps
        self._started, self._seconds = time.monotonic(), 0.0
        self.was_stopped = False  # the latest one

    def is_due(self, step: int) -> bool:
        """Return whether anything is measured after a step."""
        return any(self._is_due(step, interval) for interval in (self._validation_interval, self._interval))

    def metrics(self, step: int, stages: list[Any], valid: Mapping[str, Any]) -> dict[str, float]:
        """Return what is due after a step, under the metrics' names; where it is stopped, what was whole by then.

        Args:
            stages: the chunks of this rank's stage, their weights up to date.
            valid: the validation sets by name.

        Raises:
            DivergenceError: a loss or a log-probability is not finite.
            InputError: a validation set has no learned token.
        """
        started = time.monotonic()
        measured: dict[str, float] = {}
        self.was_stopped = False
        due = list(self._due(step, stages, valid))
        for number, (_, measure) in enumerate(due):
            try:
                measured |= measure()
            except Stopped:
                self.was_stopped = True
                left = ", ".join(what for what, _ in due[number:])
                logger.info("step %d  evaluation stopped; not measured, and not logged: %s", step, left)
                break
        if not measured:
            return {}
        seconds = time.monotonic() - started
        self._seconds += seconds
        share = self._seconds / (time.monotonic() - self._started)
        return {**measured, "evaluation_seconds": seconds, "evaluation_share": share}

    def _is_due(self, step: int, interval: int | None) -> bool:
        return step >= self._last_step or (interval is not None and step % interval == 0)

    def _due(
        self, step: int, stages: list[Any], valid: Mapping[str, Any]
    ) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
        """Yield what is measured after a step, in order, the same on all ranks: its name, and the call for it."""
        if self._is_due(step, self._validation_interval):
            for name, dataset in valid.items():
                yield f"validation loss ({name})", partial(self._validation_loss, step, stages, name, dataset)
        if self._is_due(step, self._interval):
            losses: dict[str, SetLoss] = {}
            for of_set in self._survey.sets:
                yield of_set.name, partial(self._perplexity_metrics, step, stages, of_set, losses)
            if self._survey.tasks:
                yield f"tasks ({', '.join(self._survey.tasks)})", partial(self._task_metrics, step, stages)

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
        self, step: int, stages: list[Any], of_set: PerplexitySet, losses: dict[str, SetLoss]
    ) -> dict[str, float]:
        """Return the metrics of all sets so far, with losses in `losses`; a group's mean comes with its last set."""
        losses |= perplexity_of_sets(
            stages, [of_set], self._grid, batch_tokens=self._batch_tokens, shall_stop=self._shall_stop
        )
        name, result = of_set.name, losses[of_set.name]
        _refuse_not_finite(step, f"the loss on {name}", result.loss)
        logger.info("step %d  %s: perplexity %.2f, loss %.4f", step, name, result.perplexity, result.loss)
        return perplexity_metrics(losses)

    def _task_metrics(self, step: int, stages: list[Any]) -> dict[str, float]:
        tasks = self._survey.tasks
        scores = scores_of_tasks(
            stages,
            tasks,
            self._grid,
            batch_tokens=self._batch_tokens,
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
    """Return what a run logs of a task, by OLMo's names: its own metric, and bits per byte where it is another."""
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
