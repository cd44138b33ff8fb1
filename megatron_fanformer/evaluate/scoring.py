"""Computes the scores of tasks and the losses of perplexity sets, in any layout, and their metrics.

A request, or a chunk of a set, is a row of an ordinary forward pass, with a mask on the scored tokens. Every metric of
a task is a quotient of two sums over documents, M = Σ a / Σ b; if the metric is a mean, b is 1.

A set's loss is the mean over the scored tokens, which are all but the first of each chunk. As in the paper, a group's
perplexity is the mean of its sets' perplexities, not exp of their mean loss.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from megatron_fanformer.errors import DivergenceError
from megatron_fanformer.evaluate.config import SETS, Group, set_name
from megatron_fanformer.evaluate.requests import TaskRequests
from megatron_fanformer.evaluate.results import MetricValue, SetResult, TaskResult, mean_value
from megatron_fanformer.evaluate.rows import losses_of_rows
from megatron_fanformer.evaluate.survey import PerplexitySet
from megatron_fanformer.evaluate.tasks import OF_ONE_ANSWER
from megatron_fanformer.runtime.parallel import RankGrid

PMI = "pmi"
"""The metric that also needs the log-probabilities after a task's neutral contexts."""

DIVISORS = {
    "len_norm": "characters_no_space",
    "len_norm_with_space": "characters",
    "bpb": "bytes_no_space",
    "bpb_with_space": "bytes",
    "ce_loss": "characters_no_space",
}
"""Which length of the continuation a metric divides by; other metrics divide by its tokens, or not at all."""

POSITIVE = 0
"""The number of the choice that F1 counts as positive: in mrpc, the first choice is "yes"."""


class TaskScores(NamedTuple):
    """Log-probabilities of a task's continuations, in nats."""

    conditional: np.ndarray
    """[requests]: after the requests' own contexts."""
    unconditional: np.ndarray | None = None
    """[requests]: after the task's neutral contexts; None if the task has none, or its metric does not need them."""


def scores_of_tasks(
    stages: list[Any],
    tasks: Mapping[str, TaskRequests],
    grid: RankGrid,
    *,
    batch_tokens: int,
    every_metric: bool,
    shall_stop: Callable[[], bool] | None = None,
) -> dict[str, TaskScores]:
    """Return the scores of tasks, by the tasks' names; a collective call.

    Args:
        batch_tokens: about how many tokens a micro batch has.
        every_metric: also score after the neutral contexts of all tasks that have them; False: only of tasks whose
            default metric needs these scores.
        shall_stop: called before each batch; if it returns true, raise Stopped.
    """
    neutral_tasks = {
        name: task.unconditional
        for name, task in tasks.items()
        if task.unconditional is not None and (every_metric or task.metric == PMI)
    }
    all_tasks = [*tasks.values(), *neutral_tasks.values()]
    scores = log_probabilities(stages, all_tasks, grid, batch_tokens=batch_tokens, shall_stop=shall_stop)
    conditional = dict(zip(tasks, scores[: len(tasks)], strict=True))
    unconditional = dict(zip(neutral_tasks, scores[len(tasks) :], strict=True))
    return {name: TaskScores(conditional[name], unconditional.get(name)) for name in tasks}


def log_probabilities(
    stages: list[Any],
    tasks: Sequence[TaskRequests],
    grid: RankGrid,
    *,
    batch_tokens: int,
    shall_stop: Callable[[], bool] | None = None,
) -> list[np.ndarray]:
    """Return the log-probability of each request's continuation, in nats; a collective call.

    The requests of all tasks share batches; equal requests are scored once.

    Returns:
        An array for each task: [requests] float64, in the task's order, the same on every rank.
    """
    rows: list[np.ndarray] = []  # the ids of requests that differ
    row_numbers: dict[tuple[bytes, int], int] = {}  # by ids and number of scored tokens, in the order of `rows`
    rows_by_task = []
    for task in tasks:
        task_rows = []
        requests = np.split(task.ids, task.offsets[1:-1])
        for ids, scored in zip(requests, task.continuation_tokens.tolist(), strict=True):
            number = row_numbers.setdefault((ids.tobytes(), scored), len(rows))
            if number == len(rows):  # no earlier request is equal
                rows.append(ids)
            task_rows.append(number)
        rows_by_task.append(task_rows)
    losses = losses_of_rows(
        stages,
        np.array([len(ids) for ids in rows]),
        rows.__getitem__,
        grid,
        batch_tokens=batch_tokens,
        scored=np.array([scored for _, scored in row_numbers]),
        shall_stop=shall_stop,
    )
    return [-losses[task_rows] for task_rows in rows_by_task]


# -- metrics


def task_metrics(requests: TaskRequests, scores: TaskScores) -> dict[str, MetricValue]:
    """Return every metric that applies to a task, by the metric's name.

    Five metrics are the share of documents in which the right choice has the highest score; in a tie, the first choice
    wins. They differ in the score:

    - `acc`: log P, the log-probability of the choice after the context;
    - `len_norm`: log P divided by characters, without the leading space, as in the paper;
    - `len_norm_with_space`: log P divided by all characters, as in OLMES and ai2-olmo-eval 0.9.0;
    - `per_token`: log P divided by tokens;
    - `pmi`: log P minus the log-probability after the task's neutral context.

    `f1`, computed only if it is the task's default metric, takes the predictions of `acc`; the first choice (yes) is
    positive. Three metrics are means over the right choices: `bpb` and `bpb_with_space` (bits per byte without and with
    the leading space) and `ce_loss` (nats per character without it). Tasks with one choice have only these three.

    Raises DivergenceError if a log-probability is not finite.
    """
    return {name: mean_value(*columns.T) for name, columns in document_terms(requests, scores).items()}


def document_terms(requests: TaskRequests, scores: TaskScores) -> dict[str, np.ndarray]:
    """Return, for each metric, [documents, 2] float64: each document's terms of the numerator and the denominator.

    To bootstrap a metric, resample the rows and divide their sums.

    Raises DivergenceError if a log-probability is not finite.
    """
    for values in scores:
        if values is not None and (bad := np.count_nonzero(~np.isfinite(values))):
            raise DivergenceError(
                f"task {requests.name}: {bad} of {len(values)} log-probabilities are not finite; the model diverged: "
                "evaluate an earlier checkpoint"
            )
    is_right_choice = requests.labels == requests.choices
    terms: dict[str, np.ndarray] = {}
    if requests.metric not in OF_ONE_ANSWER or requests.choices.any():  # the task has choices to compare
        choice_scores = {
            "acc": scores.conditional,
            "len_norm": _divided(scores.conditional, requests.lengths[DIVISORS["len_norm"]]),
            "len_norm_with_space": _divided(scores.conditional, requests.lengths[DIVISORS["len_norm_with_space"]]),
            "per_token": _divided(scores.conditional, requests.continuation_tokens),
        }
        if scores.unconditional is not None:
            choice_scores[PMI] = scores.conditional - scores.unconditional
        predictions = {name: _predictions(requests, values) for name, values in choice_scores.items()}
        labels = requests.labels[is_right_choice]  # one for each document
        terms = {name: _mean_terms(predicted == labels) for name, predicted in predictions.items()}
        if requests.metric == "f1":
            predicted, actual = predictions["acc"] == POSITIVE, labels == POSITIVE
            # F1 is 2 TP / (2 TP + FP + FN): the denominator is the positive predictions plus the positive labels.
            numerators, denominators = 2.0 * (predicted & actual), 1.0 * predicted + 1.0 * actual
            terms["f1"] = np.stack([numerators, denominators], axis=1)
    right_lengths = {name: lengths[is_right_choice] for name, lengths in requests.lengths.items()}
    for name, nats_per_unit in (("bpb", math.log(2)), ("bpb_with_space", math.log(2)), ("ce_loss", 1.0)):
        nats = -_divided(scores.conditional[is_right_choice], right_lengths[DIVISORS[name]])
        terms[name] = _mean_terms(nats / nats_per_unit)
    return terms


def _divided(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return values divided by lengths; −inf where a length is 0, so that such a continuation is never chosen."""
    return np.where(lengths > 0, values / np.maximum(lengths, 1), -np.inf)


def _predictions(requests: TaskRequests, scores: np.ndarray) -> np.ndarray:
    """Return [documents]: the choice with the highest score; documents may have different numbers of choices."""
    _, rows = np.unique(requests.documents, return_inverse=True)  # documents' numbers may have gaps; rows' have none
    table = np.full((rows[-1] + 1, requests.choices.max() + 1), -np.inf)
    table[rows, requests.choices] = scores
    return table.argmax(axis=1)


def _mean_terms(numerators: np.ndarray) -> np.ndarray:
    return np.stack([numerators.astype(np.float64), np.ones(len(numerators))], axis=1)  # the denominators of a mean


def choice_result(task: TaskRequests, scores: TaskScores) -> TaskResult:
    """Return the result of a task: every metric, and for the default metric the scores of each document."""
    divisors = task.lengths[DIVISORS[task.metric]] if task.metric in DIVISORS else task.continuation_tokens
    begins = np.flatnonzero(np.diff(task.documents, prepend=-1)).tolist()  # index of each document's first request
    terms = document_terms(task, scores)[task.metric].tolist()
    documents = []
    for first, end, (score, weight) in zip(begins, [*begins[1:], len(task)], terms, strict=True):
        document = {
            "doc_id": int(task.documents[first]),
            "label": int(task.labels[first]),
            "log_probabilities": scores.conditional[first:end].tolist(),
        }
        if scores.unconditional is not None:
            document["unconditional"] = scores.unconditional[first:end].tolist()
        documents.append(document | {"lengths": divisors[first:end].tolist(), "score": score, "weight": weight})
    return TaskResult(metric=task.metric, metrics=task_metrics(task, scores), documents=documents, cut=task.cut)


# -- perplexity sets


def perplexity_of_sets(
    stages: list[Any],
    sets: Sequence[PerplexitySet],
    grid: RankGrid,
    *,
    batch_tokens: int,
    shall_stop: Callable[[], bool] | None = None,
) -> dict[str, SetResult]:
    """Return the results of sets, by the sets' names, the same on every rank; a collective call.

    Raises:
        CorruptError: a file has become shorter since it was opened, or holds an id outside the vocabulary.
        Stopped: `shall_stop`, which is called before each batch, returned true.
    """
    results = {}
    for perplexity_set in sets:
        chunks, size = perplexity_set.chunks(), perplexity_set.chunk_tokens
        sums = losses_of_rows(
            stages,
            np.full(len(chunks), size),
            partial(_read_chunk, perplexity_set, chunks),
            grid,
            batch_tokens=batch_tokens,
            shall_stop=shall_stop,
        )
        tokens = len(chunks) * (size - 1)
        results[perplexity_set.name] = set_result(float(sums.sum()) / tokens, tokens, perplexity_set.bytes_per_token)
    return results


def _read_chunk(perplexity_set: PerplexitySet, chunks: np.ndarray, row: int) -> np.ndarray:
    return perplexity_set.read(chunks[row])


def set_result(loss: float, tokens: int, bytes_per_token: float | None = None) -> SetResult:
    """Return the result of a set with `tokens` scored tokens, whose mean loss is `loss` nats.

    A perplexity that overflows a float is infinite; a file of results has null in its place.
    """
    bits_per_byte = loss / math.log(2) / bytes_per_token if bytes_per_token else None
    return SetResult(loss=loss, perplexity=_exp(loss), bits_per_byte=bits_per_byte, tokens=tokens)


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf  # from 710 on, math.exp raises OverflowError


def group_perplexities(results: Mapping[str, SetResult]) -> dict[Group, float]:
    """Return the mean perplexity of those groups of the paper whose sets were all measured."""
    return {
        group: float(np.mean([_exp(results[set_name(group, name)].loss) for name in names]))
        for group, names in SETS.items()
        if all(set_name(group, name) in results for name in names)
    }


def perplexity_metrics(results: Mapping[str, SetResult]) -> dict[str, float]:
    """Return the metrics that a run logs for perplexity sets, by OLMo's names."""
    metrics: dict[str, float] = {}
    for name, result in results.items():
        metrics[f"eval/{name}/CrossEntropyLoss"] = result.loss
        metrics[f"eval/{name}/Perplexity"] = _exp(result.loss)
        if result.bits_per_byte is not None:
            metrics[f"eval/{name}/BitsPerByte"] = result.bits_per_byte
    return {**metrics, **{f"eval/{group}/Perplexity": mean for group, mean in group_perplexities(results).items()}}
