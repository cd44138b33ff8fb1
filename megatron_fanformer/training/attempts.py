"""Computes a step, and once more if its numbers are bad: a machine's fault is not there the second time."""

import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_fanformer.runtime.parallel import RankGrid
from megatron_fanformer.runtime.pipeline import Batches
from megatron_fanformer.training.recovery import BadSteps, EventLog
from megatron_fanformer.training.step import StepResult, Sums, local_loss_and_grad_norm

logger = logging.getLogger(__name__)


class StepBatches:
    """The micro batches of one step, taken from a stream as they are asked for, and kept to be taken again."""

    def __init__(self, stream: Batches, count: int) -> None:
        self._stream, self._count = stream, count
        self._taken: list[dict[str, Tensor]] = []

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in range(self._count):
            if number == len(self._taken):
                self._taken.append(next(self._stream))
            yield self._taken[number]

    def skip(self) -> None:
        """Take them, for nobody."""
        for _ in itertools.islice(self._stream, self._count):
            pass


class StepRetrier:
    """The computation of a run's steps, up to the update of the weights; every rank has one.

    Args:
        attempt: computes a step of the micro batches that it is given, as `attempt_step`.
        bad_steps: judges the numbers.
        events: where a repetition is recorded.
        again: compute a bad step once more.
    """

    def __init__(
        self,
        attempt: Callable[[Batches], tuple[StepResult, Sums]],
        stages: list[Any],
        grid: RankGrid,
        *,
        bad_steps: BadSteps,
        events: EventLog,
        again: bool,
    ) -> None:
        self._attempt, self._stages, self._grid = attempt, stages, grid
        self._bad_steps, self._events, self._again = bad_steps, events, again

    def take(self, step: int, batches: StepBatches) -> tuple[StepResult, str | None]:
        """Compute a step, its gradients in the buffers; returns its last numbers, and what is wrong with them."""
        result, sums = self._attempt(iter(batches))
        fault = self._bad_steps.fault_in(result.loss, result.grad_norm)
        if fault is None or not self._again:
            return result, fault
        own = [local_loss_and_grad_norm(self._stages, sums)]
        result, sums = self._attempt(iter(batches))
        own.append(local_loss_and_grad_norm(self._stages, sums))
        still = self._bad_steps.fault_in(result.loss, result.grad_norm)
        self._log_fault(step, fault, still, own)
        return result, still

    def _log_fault(self, step: int, first: str, second: str | None, own: list[tuple[float, float]]) -> None:
        """Say which ranks computed otherwise when the step was repeated; a collective call."""
        ranks: list[Any] = [own]
        if self._grid.world_size > 1:
            ranks = [None] * self._grid.world_size
            dist.all_gather_object(ranks, own)
        differing = [rank for rank, (before, after) in enumerate(ranks) if repr(before) != repr(after)]
        not_finite = [rank for rank, (_, after) in enumerate(ranks) if not all(map(math.isfinite, after))]
        who = f"rank {', '.join(map(str, differing))} computed otherwise" if differing else "every rank the same"
        if second is not None and 0 < len(not_finite) < len(ranks):  # a machine that fails each time, or its documents
            who += f"; not finite on rank {', '.join(map(str, not_finite))} alone"
        logger.info("step %d  %s; computed again, %s (%s)", step, first, "is good" if second is None else second, who)
        self._events.add("computed_again", step, first=first, second=second, ranks=differing)
