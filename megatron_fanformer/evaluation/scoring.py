"""Requests to log-probabilities, in any layout: the ordinary forward with labels, and a mask on the continuations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_fanformer.evaluation.metrics import PMI
from megatron_fanformer.evaluation.requests import TaskRequests
from megatron_fanformer.evaluation.rows import losses_of_rows
from megatron_fanformer.runtime.parallel import RankGrid


class TaskScores(NamedTuple):
    """Log-probabilities of a task's continuations, in nats, as `task_metrics` takes them."""

    own: np.ndarray
    """[n]: scores behind the requests' own contexts."""
    unconditional: np.ndarray | None
    """[n]: scores behind the task's neutral context; None if not requested, or if the task has none."""


def scores_of_tasks(
    stages: list[Any],
    tasks: Mapping[str, TaskRequests],
    grid: RankGrid,
    *,
    batch_tokens: int,
    every_metric: bool,
    shall_stop: Callable[[], bool] | None = None,
) -> dict[str, TaskScores]:
    """Return the scores of tasks, by name; the arguments and errors are those of `log_probabilities`.

    Args:
        every_metric: whether neutral contexts are scored wherever there are any, or only for a task's own metric.
    """
    neutral = {
        name: twin
        for name, task in tasks.items()
        if (twin := task.unconditional) is not None and (every_metric or task.metric == PMI)
    }
    both = [*tasks.values(), *neutral.values()]
    found = log_probabilities(stages, both, grid, batch_tokens=batch_tokens, shall_stop=shall_stop)
    unconditional = dict(zip(neutral, found[len(tasks) :], strict=True))
    own = zip(tasks, found[: len(tasks)], strict=True)
    return {name: TaskScores(scores, unconditional.get(name)) for name, scores in own}


def log_probabilities(
    stages: list[Any],
    tasks: Sequence[TaskRequests],
    grid: RankGrid,
    *,
    batch_tokens: int,
    shall_stop: Callable[[], bool] | None = None,
) -> list[np.ndarray]:
    """Return the log-probability of each request's continuation behind its context, in nats, as `losses_of_rows`.

    The requests of all tasks share batches; equal ones are scored once.

    Returns:
        For each task [n] float64, in its requests' order, the same on every rank.
    """
    rows = _Rows()
    numbers = [np.array([rows.number(task, request) for request in range(len(task))], dtype=np.int64) for task in tasks]
    losses = losses_of_rows(
        stages,
        np.array([len(ids) for ids in rows.ids]),
        lambda row: rows.ids[row],
        grid,
        batch_tokens=batch_tokens,
        scored=np.array(rows.scored),
        shall_stop=shall_stop,
    )
    return [-losses[of_task] for of_task in numbers]


class _Rows:
    def __init__(self) -> None:
        self.ids: list[np.ndarray] = []
        self.scored: list[int] = []
        """Length of each row's continuation: the last so many of its ids."""
        self._numbers: dict[tuple[bytes, int], int] = {}

    def number(self, task: TaskRequests, request: int) -> int:
        """Return the number of a request's row, which is added if there is none."""
        ids = task.ids[task.offsets[request] : task.offsets[request + 1]]
        scored = int(task.continuation_tokens[request])
        number = self._numbers.setdefault((ids.tobytes(), scored), len(self.ids))
        if number == len(self.ids):
            self.ids.append(ids)
            self.scored.append(scored)
        return number
