"""Comparison of two models on the same documents: the difference of their metrics, with a 95% interval.

Documents differ from one another far more than two models do on one document, so that the difference is taken document
by document, and its uncertainty is that of the choice of documents. The bootstrap draws those: as many as there are,
with replacement, ten thousand times (Efron and Tibshirani, An Introduction to the Bootstrap, chapters 8 and 13: the
percentile interval of paired data).
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.results import LOWER_IS_BETTER, Result, TaskResult, figure, is_share
from megatron_fanformer.evaluate.tasks import GENERATED
from megatron_fanformer.options import option_name
from megatron_fanformer.terminal import table

DRAWS = 10_000
INTERVAL = (0.025, 0.975)
KINDS = 256  # up to so many kinds of documents, drawing numbers of each kind is cheaper than drawing documents
TEXT_SETTINGS, SAMPLE_SETTINGS = ("temperature", "max_new_tokens"), ("num_samples", "top_k", "top_p")
"""The settings of texts that a model writes, and those that count above temperature 0 alone. Not the seed: it draws
other texts of the same kind."""
BLOCK = 1 << 20  # documents that are drawn at a time


class ScoredDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a document that are compared: a metric is the sum of scores by the sum of weights."""

    doc_id: int | str
    score: float
    weight: float = 1.0
    label: int | None = None
    """The right choice, of choice tasks."""
    rule: str | None = None
    """The rule, of ULogic, whose documents are numbers in a file of the user's."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The difference of B from A in one metric, as a file has it."""

    name: str
    metric: str | None
    """None for a mean over tasks."""
    a: float
    b: float
    difference: float
    """b - a."""
    interval: tuple[float, float]
    """The 95% interval of b - a."""
    standard_error: float
    """Standard error of b - a, by the same draws."""
    documents: int

    @property
    def is_shown(self) -> bool:
        """Return whether the interval leaves out 0."""
        return self.interval[0] > 0 or self.interval[1] < 0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two results, side by side."""

    a: Result
    b: Result
    tasks: list[Difference]
    mean: Difference | None
    """Mean difference over the tasks whose metric is a share of documents; None with fewer than two of them."""

    @property
    def differences(self) -> list[Difference]:
        """Return those of the tasks, and their mean."""
        return [*self.tasks, *([self.mean] if self.mean else [])]


def compare(a: Result, b: Result, *, seed: int = 0, draws: int = DRAWS) -> Comparison:
    """Return the differences of two results in the tasks that both have, each by its own metric.

    Raises:
        InputError: they have no task and no perplexity set in common, or a task's documents or a set's tokens differ,
            or the settings by which answers were written.
    """
    common = [name for name in a.tasks if name in b.tasks]
    sets = _common_sets(a, b)
    if not common and not sets:
        raise InputError(
            f"{a.checkpoint} and {b.checkpoint} were evaluated on no task and no perplexity set in common; evaluate "
            "both on the same"
        )
    _refuse_other_settings(a, b, sets, [name for name in common if a.tasks[name].metric in GENERATED])
    differences, shares = [], []
    for name in common:
        # By its name: a task's draws do not depend on the others, and are not theirs.
        generator = np.random.default_rng((seed, zlib.crc32(name.encode())))
        difference, drawn = _task_difference(name, a.tasks[name], b.tasks[name], draws, generator)
        differences.append(difference)
        if is_share(difference.metric):
            shares.append((difference, drawn))
    mean = None
    if len(shares) > 1:
        values = [float(np.mean([getattr(difference, which) for difference, _ in shares])) for which in "ab"]
        drawn = np.mean([drawn for _, drawn in shares], axis=0)
        documents = sum(difference.documents for difference, _ in shares)
        mean = _difference(f"mean of {len(shares)} tasks", None, values, drawn, documents)
    return Comparison(a=a, b=b, tasks=differences, mean=mean)


def _refuse_other_settings(a: Result, b: Result, sets: list[str], generated: list[str]) -> None:
    """Refuse perplexities of other tokens, or of tokens cut otherwise, and answers that were not written alike."""
    if sets:
        _refuse_unequal(", ".join(sets), "the tokenizer", *(str(result.tokenizer)[:12] for result in (a, b)))
        for name in ("chunking", "chunk_tokens", "limit_tokens"):
            _refuse_unequal(", ".join(sets), option_name(name), *(getattr(r.settings, name, None) for r in (a, b)))
        for name in sets:
            _refuse_unequal(name, "the number of scored tokens", *(r.perplexity[name].tokens for r in (a, b)))
    if generated:
        in_a, in_b = (result.settings.sampling if result.settings else {} for result in (a, b))
        is_greedy = in_a.get("temperature") == in_b.get("temperature") == 0
        for name in TEXT_SETTINGS if is_greedy else (*TEXT_SETTINGS, *SAMPLE_SETTINGS):
            _refuse_unequal(", ".join(generated), option_name(name), in_a.get(name), in_b.get(name))


def _refuse_unequal(measured: str, name: str, in_a: object, in_b: object) -> None:
    if in_a != in_b:
        raise InputError(f"{measured}: {name} is {in_a} in A and {in_b} in B; evaluate both alike")


def _task_difference(
    name: str, a: TaskResult, b: TaskResult, draws: int, generator: np.random.Generator
) -> tuple[Difference, np.ndarray]:
    _refuse_unequal(name, "the metric", a.metric, b.metric)
    in_a, in_b = _documents(name, a), _documents(name, b)
    _refuse_unequal(name, "the number of documents", len(in_a), len(in_b))
    for left, right in zip(in_a, in_b, strict=True):
        if (left.doc_id, left.label, left.rule) != (right.doc_id, right.label, right.rule):
            raise InputError(
                f"{name}: document {left.doc_id} of A is another one in B; evaluate both with the same --requests, "
                "--limit and files"
            )
    if None not in (a.made_of, b.made_of):
        _refuse_unequal(name, "its source", a.made_of, b.made_of)
    sums = [np.array([(document.score, document.weight) for document in documents]) for documents in (in_a, in_b)]
    drawn = resampled_sums(np.concatenate(sums, axis=1), draws, generator)
    differences = _quotient(drawn[:, 2:]) - _quotient(drawn[:, :2])
    values = [float(_quotient(rows.sum(0))) for rows in sums]
    return _difference(name, a.metric, values, differences, len(in_a)), differences


def _difference(
    name: str, metric: str | None, values: Sequence[float], drawn: np.ndarray, documents: int
) -> Difference:
    low, high = np.quantile(drawn, INTERVAL)
    a, b = values
    return Difference(
        name=name,
        metric=metric,
        a=a,
        b=b,
        difference=b - a,
        interval=(float(low), float(high)),
        standard_error=float(drawn.std()),
        documents=documents,
    )


def resampled_sums(features_nf: np.ndarray, draws: int, generator: np.random.Generator) -> np.ndarray:
    """Return [draws, f]: the sums of features [n, f] over n documents that are drawn from the n with replacement.

    Documents with the same features are not distinguished: how often each kind of them is drawn is multinomial, so that
    the draws of a task of yes and no cost the same for any number of documents.
    """
    kinds, counts = np.unique(features_nf, axis=0, return_counts=True)
    documents = len(features_nf)
    if len(kinds) <= KINDS:
        return generator.multinomial(documents, counts / documents, size=draws) @ kinds
    sums = np.empty((draws, features_nf.shape[1]))
    rows = max(1, BLOCK // documents)
    for first in range(0, draws, rows):
        drawn = generator.integers(documents, size=(min(rows, draws - first), documents))
        sums[first : first + rows] = features_nf[drawn].sum(axis=1)
    return sums


def _quotient(sums: np.ndarray) -> np.ndarray:
    """Divide, [..., 2] to [...]; 0, as is the custom for F1, where there is nothing to divide by."""
    scores, weights = sums[..., 0], sums[..., 1]
    return np.divide(scores, weights, out=np.zeros_like(scores), where=weights > 0)


def _documents(name: str, task: TaskResult) -> list[ScoredDocument]:
    try:
        documents = msgspec.convert(task.documents, list[ScoredDocument])
    except msgspec.ValidationError as error:
        raise InputError(f"{name}: its documents cannot be compared ({error}); evaluate again") from None
    if not documents:
        raise InputError(f"{name} has no documents in the result; evaluate again")
    return documents


# -- output


def sentence(difference: Difference) -> str:
    """Return a difference in plain words."""
    metric, value = difference.metric, difference.difference
    unit = "points" if metric is None or is_share(metric) else LOWER_IS_BETTER[metric]
    name = f"{difference.name} ({metric})" if metric else difference.name
    low, high = (figure(metric, end, sign="+") for end in difference.interval)
    interval = f"95% interval {low} to {high}; {difference.documents:,} documents"
    if not difference.is_shown:
        return f"{name}: no difference shown: {figure(metric, value, sign='+')} {unit}, {interval}."
    return f"{name}: B is {'higher' if value > 0 else 'lower'} by {figure(metric, abs(value))} {unit}, {interval}."


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yield the tables, and a sentence for each task."""
    yield f"A: {comparison.a.checkpoint}"
    yield f"B: {comparison.b.checkpoint}"
    if comparison.tasks:
        rows = [
            (
                difference.name,
                *(figure(difference.metric, value) for value in (difference.a, difference.b)),
                figure(difference.metric, difference.difference, sign="+"),
                " to ".join(figure(difference.metric, end, sign="+") for end in difference.interval),
            )
            for difference in comparison.differences
        ]
        yield from table(("task", "A", "B", "B − A", "95% interval"), rows, align="lrrrr")
    if perplexities := perplexity_differences(comparison):
        rows = [
            (name, f"{row['a']:,.2f}", f"{row['b']:,.2f}", f"{row['difference']:+,.2f}")
            for name, row in perplexities.items()
        ]
        yield from table(("perplexity, without an interval", "A", "B", "B − A"), rows, align="lrrr")
    yield from map(sentence, comparison.differences)


def perplexity_differences(comparison: Comparison) -> dict[str, dict[str, float]]:
    """Return A's and B's perplexity of the sets and groups that both have; a result has no losses of documents."""
    a, b = comparison.a, comparison.b
    pairs = {name: (a.perplexity[name].perplexity, b.perplexity[name].perplexity) for name in _common_sets(a, b)}
    pairs |= {f"{group} mean": (mean, b.groups[group]) for group, mean in a.groups.items() if group in b.groups}
    return {
        name: {"a": in_a, "b": in_b, "difference": in_b - in_a}
        for name, (in_a, in_b) in pairs.items()
        if in_a is not None and in_b is not None
    }


def _common_sets(a: Result, b: Result) -> list[str]:
    return [name for name in a.perplexity if name in b.perplexity]


def comparison_values(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as a file has it; differences are B − A."""
    return {
        "a": comparison.a.checkpoint,
        "b": comparison.b.checkpoint,
        "tasks": {difference.name: difference for difference in comparison.tasks},
        "mean": comparison.mean,
        "perplexity": perplexity_differences(comparison),
        "sentences": [sentence(difference) for difference in comparison.differences],
    }
