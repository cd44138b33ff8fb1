"""Requests to log-probabilities, in any layout: the ordinary forward with labels, and a mask on the continuations."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from megatron_fanformer.evaluate.metrics import PMI
from megatron_fanformer.evaluate.requests import TaskRequests
from megatron_fanformer.evaluate.rows import losses_of_rows
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
    scores = log_probabilities(stages, both, grid, batch_tokens=batch_tokens, shall_stop=shall_stop)
    unconditional = dict(zip(neutral, scores[len(tasks) :], strict=True))
    own = zip(tasks, scores[: len(tasks)], strict=True)
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
    numbers: dict[tuple[bytes, int], int] = {}
    rows: list[np.ndarray] = []
    rows_of_tasks = []
    for task in tasks:
        of_task = []
        requests = np.split(task.ids, task.offsets[1:-1])
        for ids, scored in zip(requests, task.continuation_tokens.tolist(), strict=True):
            number = numbers.setdefault((ids.tobytes(), scored), len(rows))
            if number == len(rows):
                rows.append(ids)
            of_task.append(number)
        rows_of_tasks.append(of_task)
    losses = losses_of_rows(
        stages,
        np.array([len(ids) for ids in rows]),
        rows.__getitem__,
        grid,
        batch_tokens=batch_tokens,
        scored=np.array([scored for _, scored in numbers]),
        shall_stop=shall_stop,
    )
    return [-losses[of_task] for of_task in rows_of_tasks]
