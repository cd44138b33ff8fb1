"""Two results compared: differences, and how often their intervals hold the truth."""

from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.comparison import compare, sentence
from megatron_fanformer.evaluate.results import MetricValue, Result, SetResult, Settings, TaskResult

RANDOM = np.random.default_rng(0)


def task(scores: Any, metric: str = "acc", weights: Any = None) -> TaskResult:
    documents = [{"doc_id": number, "score": float(score)} for number, score in enumerate(scores)]
    for document, weight in zip(documents, [] if weights is None else weights, strict=False):
        document["weight"] = float(weight)
    value = MetricValue(value=float(np.mean(scores)), standard_error=0.0, documents=len(documents))
    return TaskResult(metric=metric, metrics={metric: value}, documents=documents)


def result(name: str = "run", **tasks: TaskResult) -> Result:
    return Result(checkpoint=name, versions={}, tasks=tasks)


def test_a_model_does_not_differ_from_itself() -> None:
    own = result(
        yes=task(RANDOM.random(500) < 0.4),
        bits=task(RANDOM.random(500), "bpb"),
        pairs=task(RANDOM.integers(2, size=300), "f1", weights=RANDOM.integers(3, size=300)),
    )
    found = compare(own, own)
    assert [(each.difference, each.interval, each.standard_error) for each in found.tasks] == [(0, (0, 0), 0)] * 3
    assert found.mean is not None and (found.mean.difference, found.mean.interval) == (0, (0, 0))
    assert all("no difference shown: +0.00" in sentence(each) for each in found.differences)


def planted(better: float, documents: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    """A is right in half of the documents; B in the same ones, and in that share of the others."""
    a = np.arange(documents) % 2 == 0
    return a, a | (np.arange(documents) % 2000 < 2 * better * documents)


def test_a_planted_difference_is_found() -> None:
    a, b = planted(0.03)
    found = compare(result(piqa=task(a), sciq=task(a)), result(piqa=task(b), sciq=task(a)))
    piqa, sciq = found.tasks
    assert piqa.difference == pytest.approx(0.03)
    assert piqa.is_shown and 0.02 < piqa.interval[0] < piqa.interval[1] < 0.042
    # the differences of documents are 0 and 1, 30 of a thousand
    assert piqa.standard_error == pytest.approx(np.sqrt(0.03 * 0.97 / 1000), rel=0.03)
    assert not sciq.is_shown
    assert found.mean is not None and found.mean.difference == pytest.approx(0.015)
    first, second, third = map(sentence, found.differences)
    assert first.startswith("piqa (acc): B is higher by 3.00 points, 95% interval +")
    assert second.startswith("sciq (acc): no difference shown")
    assert third.startswith("mean of 2 tasks: B is higher by 1.50 points")


def f1(labels: np.ndarray, choices: np.ndarray) -> float:
    hits = ((labels == 1) & (choices == 1)).sum()
    return float(2 * hits / (2 * hits + (labels != choices).sum()))


def f1_task(labels: np.ndarray, choices: np.ndarray) -> TaskResult:
    """F1 as a quotient of sums: twice the hits, by all that is found and all that is there."""
    found, there = choices == 1, labels == 1
    return task(2 * (found & there), "f1", weights=found.astype(int) + there)


def test_f1_is_drawn_as_f1() -> None:
    labels = (RANDOM.random(408) < 0.684).astype(int)
    always, random = np.ones_like(labels), RANDOM.integers(2, size=408)
    found = compare(*(result(mrpc=f1_task(labels, choices)) for choices in (always, random))).tasks[0]
    assert (found.a, found.b) == pytest.approx((f1(labels, always), f1(labels, random)))
    drawn = RANDOM.integers(408, size=(4000, 408))  # the same, document by document
    differences = [f1(labels[rows], random[rows]) - f1(labels[rows], always[rows]) for rows in drawn]
    assert found.standard_error == pytest.approx(np.std(differences), rel=0.05)
    assert found.interval == pytest.approx(np.quantile(differences, (0.025, 0.975)), abs=0.006)


@pytest.mark.parametrize(("documents", "tasks"), [(150, 400), pytest.param(600, 2000, marks=pytest.mark.full)])
def test_the_interval_holds_the_truth_95_times_in_100(documents: int, tasks: int) -> None:
    """Two models of 60% and 63%, right together in half of the documents; tasks drawn from all documents there are."""
    probabilities = [0.50, 0.10, 0.13, 0.27]  # both, A alone, B alone, none
    truth, held = 0.03, 0
    generator = np.random.default_rng(documents)
    for _ in range(tasks):
        kinds = generator.choice(4, size=documents, p=probabilities)
        a, b = task(kinds <= 1), task((kinds == 0) | (kinds == 2))
        found = compare(result(x=a), result(x=b), seed=int(generator.integers(2**31)), draws=1000).tasks[0]
        held += found.interval[0] <= truth <= found.interval[1]
    assert 0.93 <= held / tasks <= 0.97


def test_other_documents_and_metrics_are_refused() -> None:
    a, b = planted(0.03)
    others = task(b)
    others.documents[0]["doc_id"] = -1
    for of_b, message in (
        (task(b[:500]), "piqa: the number of documents is 1000 in A and 500 in B; evaluate both alike"),
        (others, "piqa: document 0 of A is another one in B"),
        (task(b, "bpb"), "piqa: the metric is acc in A and bpb in B"),
    ):
        with pytest.raises(InputError, match=message):
            compare(result(piqa=task(a)), result(piqa=of_b))
    with pytest.raises(InputError, match="no task and no perplexity set in common"):
        compare(result(piqa=task(a)), result(sciq=task(b)))


def with_set(*, tokens: int = 100, tokenizer: str = "a" * 64, **settings: Any) -> Result:
    usual = {"chunking": "tokens", "chunk_tokens": 32, "limit_tokens": None, "batch_tokens": 64, "dtype": "float32"}
    return Result(
        checkpoint="run",
        versions={},
        tokenizer=tokenizer,
        settings=Settings(**(usual | settings), sampling={}),
        perplexity={"ptb": SetResult(loss=1.0, perplexity=np.e, bits_per_byte=None, tokens=tokens)},
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"tokens": 99}, "ptb: the number of scored tokens is 100 in A and 99 in B"),
        ({"chunking": "documents"}, "--chunking is tokens in A and documents in B"),
        ({"chunk_tokens": 16}, "--chunk-tokens is 32 in A and 16 in B"),
        ({"tokenizer": "b" * 64}, "ptb: the tokenizer is aaaaaaaaaaaa in A and bbbbbbbbbbbb in B"),
    ],
)
def test_perplexities_of_other_tokens_are_not_compared(other: dict[str, Any], message: str) -> None:
    compare(with_set(), with_set(dtype="bfloat16"))
    with pytest.raises(InputError, match=message):
        compare(with_set(), with_set(**other))


def written(**sampling: Any) -> Result:
    """GSM8K's answers, and a choice task."""
    usual = {
        "allow_code_execution": False,
        "num_samples": 1,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": None,
    }
    tasks = {"gsm8k": task(np.ones(3), "exact_match"), "piqa": task(np.ones(3))}
    return msgspec.structs.replace(with_set(), tasks=tasks, settings=settings(usual | {"seed": 0} | sampling))


def settings(sampling: dict[str, Any]) -> Settings:
    of_sets = {"chunking": "tokens", "chunk_tokens": 32, "limit_tokens": None}
    return Settings(**of_sets, batch_tokens=64, dtype="float32", sampling=sampling)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ({}, {"temperature": 0.8}, "gsm8k: --temperature is 0.0 in A and 0.8 in B; evaluate both alike"),
        ({}, {"max_new_tokens": 9}, "--max-new-tokens is None in A and 9 in B"),
        ({"temperature": 0.8}, {"temperature": 0.8, "num_samples": 4}, "--num-samples is 1 in A and 4 in B"),
        ({"temperature": 0.8, "top_k": 5}, {"temperature": 0.8}, "--top-k is 5 in A and 0 in B"),
    ],
)
def test_answers_that_were_not_written_alike_are_not_compared(a: Any, b: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        compare(written(**a), written(**b))
    for of_choices in (written(**a), written(**b)):  # whose scores no sampling changes
        del of_choices.tasks["gsm8k"]
        compare(of_choices, written())


def test_tasks_are_drawn_apart_and_their_means_interval_is_that_of_independent_ones() -> None:
    """With the same draws for all, the mean of two like tasks would be as uncertain as one of them."""
    generator = np.random.default_rng(0)
    a, b = (generator.random((2, 2000)) < share for share in (0.5, 0.53))
    found = compare(result(x=task(a[0]), y=task(a[0])), result(x=task(b[0]), y=task(b[0])))
    one, other = found.tasks
    assert one.difference == other.difference and one.interval != other.interval
    assert found.mean is not None
    assert found.mean.standard_error == pytest.approx(one.standard_error / np.sqrt(2), rel=0.03)


def own_task(*, made_of: str | None, labels: tuple[int, ...] = (0, 1, 1), rule: str | None = None) -> Result:
    """Three documents that are numbers in a file."""
    documents = [{"doc_id": n, "score": 1.0, "label": label, "rule": rule} for n, label in enumerate(labels)]
    return result(own=msgspec.structs.replace(task(np.ones(3)), documents=documents, made_of=made_of))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"made_of": "SHA-256 b"}, "own: its source is SHA-256 a in A and SHA-256 b in B"),
        ({"made_of": None, "labels": (0, 1, 0)}, "own: document 2 of A is another one in B"),
        ({"made_of": None, "rule": "If X, then Y."}, "own: document 0 of A is another one in B"),
    ],
)
def test_as_many_documents_of_another_file_are_refused(other: dict[str, Any], message: str) -> None:
    a = own_task(made_of="SHA-256 a")
    for same in (a, own_task(made_of=None)):  # a result of before it was recorded
        compare(a, same)
    with pytest.raises(InputError, match=message):
        compare(a, own_task(**other))
