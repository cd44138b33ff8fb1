"""Two results compared: differences, and how often their intervals hold the truth."""

from typing import Any

import numpy as np
import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.comparison import compare, comparison_lines
from megatron_fanformer.evaluate.results import MetricValue, Result, SetResult, Settings, TaskResult

RANDOM = np.random.default_rng(0)


def task(scores: Any, metric: str = "acc", weights: Any = None, labels: Any = None) -> TaskResult:
    documents: list[dict[str, Any]] = [{"doc_id": n, "score": float(score)} for n, score in enumerate(scores)]
    for name, values in (("weight", weights), ("label", labels)):
        for document, value in zip(documents, () if values is None else values, strict=False):
            document[name] = float(value)
    value = MetricValue(value=float(np.mean(scores)), standard_error=0.0, documents=len(documents))
    return TaskResult(metric=metric, metrics={metric: value}, documents=documents)


def result(name: str = "run", **tasks: TaskResult) -> Result:
    return Result(checkpoint=name, versions={}, tasks=tasks)


def test_a_model_does_not_differ_from_itself() -> None:
    same = result(
        yes=task(RANDOM.random(500) < 0.4),
        bits=task(RANDOM.random(500), "bpb"),
        pairs=task(RANDOM.integers(2, size=300), "f1", weights=RANDOM.integers(3, size=300)),
    )
    compared = compare(same, same)
    assert [(one.difference, one.interval, one.standard_error) for one in compared.tasks.values()] == [
        (0, (0, 0), 0)
    ] * 3
    assert compared.mean is not None and (compared.mean.difference, compared.mean.interval) == (0, (0, 0))


def planted(better: float, documents: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """A is right in half of the documents; B in the same ones, and in that share of the others."""
    a = np.arange(documents) % 2 == 0
    return a, a | (np.arange(documents) % 2000 < 2 * better * documents)


def test_a_planted_difference_is_found() -> None:
    a, b = planted(0.03)
    compared = compare(result(piqa=task(a), sciq=task(a)), result(piqa=task(b), sciq=task(a)))
    piqa, sciq = compared.tasks.values()
    assert piqa.difference == pytest.approx(0.03)
    assert 0.02 < piqa.interval[0] < piqa.interval[1] < 0.042
    # the differences of documents are 0 and 1, 30 of a thousand
    assert piqa.standard_error == pytest.approx(np.sqrt(0.03 * 0.97 / 1000), rel=0.03)
    assert sciq.interval == (0, 0)
    assert compared.mean is not None and compared.mean.difference == pytest.approx(0.015)
    rows = [line.split() for line in comparison_lines(compared)]
    assert ["piqa", "50.00", "53.00", "+3.00"] in [row[:4] for row in rows]
    assert ["mean", "of", "2", "tasks", "50.00", "51.50", "+1.50"] in [row[:7] for row in rows]


def f1(labels: np.ndarray, choices: np.ndarray) -> float:
    hits = ((labels == 1) & (choices == 1)).sum()
    return float(2 * hits / (2 * hits + (labels != choices).sum()))


def f1_task(labels: np.ndarray, choices: np.ndarray) -> TaskResult:
    """F1 as a quotient of sums: twice the hits, by all that is found and all that is there."""
    said, there = choices == 1, labels == 1
    return task(2 * (said & there), "f1", weights=said.astype(int) + there)


def test_f1_is_drawn_as_f1() -> None:
    labels = (RANDOM.random(408) < 0.684).astype(int)
    always, random = np.ones_like(labels), RANDOM.integers(2, size=408)
    (one,) = compare(*(result(mrpc=f1_task(labels, choices)) for choices in (always, random))).tasks.values()
    assert (one.a, one.b) == pytest.approx((f1(labels, always), f1(labels, random)))
    drawn = RANDOM.integers(408, size=(4000, 408))  # the same, document by document
    differences = [f1(labels[rows], random[rows]) - f1(labels[rows], always[rows]) for rows in drawn]
    assert one.standard_error == pytest.approx(np.std(differences), rel=0.05)
    assert one.interval == pytest.approx(np.quantile(differences, (0.025, 0.975)), abs=0.006)


@pytest.mark.parametrize(("documents", "tasks"), [(150, 400), pytest.param(600, 2000, marks=pytest.mark.full)])
def test_the_interval_holds_the_truth_95_times_in_100(documents: int, tasks: int) -> None:
    """Two models of 60% and 63%, right together in half of the documents; tasks drawn from all documents there are."""
    probabilities = [0.50, 0.10, 0.13, 0.27]  # both, A alone, B alone, none
    truth, held = 0.03, 0
    generator = np.random.default_rng(documents)
    for _ in range(tasks):
        kinds = generator.choice(4, size=documents, p=probabilities)
        a, b = task(kinds <= 1), task((kinds == 0) | (kinds == 2))
        (one,) = compare(result(x=a), result(x=b), draws=1000).tasks.values()
        held += one.interval[0] <= truth <= one.interval[1]
    assert 0.93 <= held / tasks <= 0.97


def test_other_documents_and_metrics_are_refused() -> None:
    a, b = planted(0.03)
    others = task(b)
    others.documents[0]["doc_id"] = -1
    for of_b, message in (
        (task(b[:500]), "piqa: the number of documents is 1000 in A and 500 in B; evaluate both alike"),
        (others, "piqa: document 0 of A is another one in B"),
        (task(b, labels=[1]), "piqa: document 0 of A is another one in B"),
        (task(b, "bpb"), "piqa: the metric is acc in A and bpb in B"),
    ):
        with pytest.raises(InputError, match=message):
            compare(result(piqa=task(a)), result(piqa=of_b))
    with pytest.raises(InputError, match="no task and no perplexity set in common"):
        compare(result(piqa=task(a)), result(sciq=task(b)))


def measured(*, tokens: int = 100, tokenizer: str = "a" * 64, **settings: Any) -> Result:
    """A set, GSM8K's answers, and a choice task."""
    usual = {"chunk_tokens": 32, "limit_tokens": None, "batch_tokens": 64, "dtype": "float32"}
    return Result(
        checkpoint="run",
        versions={},
        tokenizer=tokenizer,
        settings=Settings(**(usual | settings)),
        tasks={"gsm8k": task(np.ones(3), "exact_match"), "piqa": task(np.ones(3))},
        perplexity={"ptb": SetResult(loss=1.0, perplexity=np.e, bits_per_byte=None, tokens=tokens)},
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"tokens": 99}, "ptb: the number of scored tokens is 100 in A and 99 in B"),
        ({"chunk_tokens": 16}, "--chunk-tokens is 32 in A and 16 in B"),
        ({"tokenizer": "b" * 64}, "ptb: the tokenizer is aaaaaaaaaaaa in A and bbbbbbbbbbbb in B"),
        ({"max_new_tokens": 9}, "gsm8k: --max-new-tokens is None in A and 9 in B; evaluate both alike"),
    ],
)
def test_what_was_not_measured_alike_is_not_compared(other: dict[str, Any], message: str) -> None:
    compare(measured(), measured(dtype="bfloat16"))
    with pytest.raises(InputError, match=message):
        compare(measured(), measured(**other))


def test_tasks_are_drawn_apart_and_their_means_interval_is_that_of_independent_ones() -> None:
    """With the same draws for all, the mean of two like tasks would be as uncertain as one of them."""
    generator = np.random.default_rng(0)
    a, b = (generator.random((2, 2000)) < share for share in (0.5, 0.53))
    compared = compare(result(x=task(a[0]), y=task(a[0])), result(x=task(b[0]), y=task(b[0])))
    one, other = compared.tasks.values()
    assert one.difference == other.difference and one.interval != other.interval
    assert compared.mean is not None
    assert compared.mean.standard_error == pytest.approx(one.standard_error / np.sqrt(2), rel=0.03)
