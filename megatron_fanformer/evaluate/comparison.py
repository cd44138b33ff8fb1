"""Compares two models on the same documents: the difference of their metrics, with a 95% interval.

Scores vary far more between documents than between two models on one document. So the difference is taken document by
document, and its uncertainty comes from the choice of documents. The bootstrap repeats this choice ten thousand times:
it draws as many documents as there are, with replacement (Efron and Tibshirani, An Introduction to the Bootstrap,
chapters 8 and 13: the percentile interval of paired data).
"""

import zlib
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.results import Result, TaskResult, figure, is_share
from megatron_fanformer.evaluate.tasks import GENERATED
from megatron_fanformer.options import option_name
from megatron_fanformer.terminal import table

DRAWS = 10_000
INTERVAL = (0.025, 0.975)
MOST_KINDS = 256  # with more kinds of documents, drawing single documents is cheaper than drawing each kind's number


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The difference between A and B in one metric."""

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


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Two results, side by side, as --output writes them."""

    a: str
    """The checkpoint of A."""
    b: str
    tasks: dict[str, Difference]
    mean: Difference | None
    """Mean difference over the tasks whose metric is a share of documents; None with fewer than two of them."""
    perplexity: dict[str, tuple[float, float]]
    """A's and B's perplexity of the sets and groups that both have; a result has no losses of documents."""


def compare(a: Result, b: Result, *, draws: int = DRAWS) -> Comparison:
    """Return the differences of two results in the tasks that both have, each in the task's default metric.

    Raises:
        InputError: the results have no task and no perplexity set in common, or were measured differently: they differ
            in a task's documents, a set's tokens, or the settings of generation.
    """
    tasks = [name for name in a.tasks if name in b.tasks]
    sets = [name for name in a.perplexity if name in b.perplexity]
    if not tasks and not sets:
        raise InputError(
            f"{a.checkpoint} and {b.checkpoint} were evaluated on no task and no perplexity set in common; evaluate "
            "both on the same"
        )
    if sets:
        _refuse_unequal(", ".join(sets), "the tokenizer", *(str(result.tokenizer)[:12] for result in (a, b)))
        for field in ("chunk_tokens", "limit_tokens"):
            _refuse_unequal(", ".join(sets), option_name(field), *(getattr(r.settings, field, None) for r in (a, b)))
    for name in sets:
        _refuse_unequal(name, "the number of scored tokens", *(r.perplexity[name].tokens for r in (a, b)))
    if generated := [name for name in tasks if a.tasks[name].metric in GENERATED]:
        lengths = (getattr(r.settings, "max_new_tokens", None) for r in (a, b))
        _refuse_unequal(", ".join(generated), "--max-new-tokens", *lengths)
    differences: dict[str, Difference] = {}
    drawn: dict[str, np.ndarray] = {}
    for name in tasks:
        # Seeded by the task's name, so that tasks are drawn independently, and alike whichever others are compared.
        generator = np.random.default_rng((0, zlib.crc32(name.encode())))
        differences[name], drawn[name] = _task_difference(name, a.tasks[name], b.tasks[name], draws, generator)
    shares = [name for name in tasks if is_share(differences[name].metric)]
    mean = None
    if len(shares) > 1:
        means = np.mean([(differences[name].a, differences[name].b) for name in shares], axis=0).tolist()
        documents = sum(differences[name].documents for name in shares)
        drawn_means = np.mean([drawn[name] for name in shares], axis=0)
        mean = _difference(f"mean of {len(shares)} tasks", None, means, drawn_means, documents)
    pairs = {name: (a.perplexity[name].perplexity, b.perplexity[name].perplexity) for name in sets}
    pairs |= {f"{group} mean": (in_a, b.groups[group]) for group, in_a in a.groups.items() if group in b.groups}
    perplexity = {name: (in_a, in_b) for name, (in_a, in_b) in pairs.items() if in_a is not None and in_b is not None}
    return Comparison(a=a.checkpoint, b=b.checkpoint, tasks=differences, mean=mean, perplexity=perplexity)


def _refuse_unequal(measured: str, name: str, in_a: object, in_b: object) -> None:
    if in_a != in_b:
        raise InputError(f"{measured}: {name} is {in_a} in A and {in_b} in B; evaluate both alike")


def _task_difference(
    name: str, a: TaskResult, b: TaskResult, draws: int, generator: np.random.Generator
) -> tuple[Difference, np.ndarray]:
    """Return a task's difference, and [draws] the difference in each draw of documents."""
    _refuse_unequal(name, "the metric", a.metric, b.metric)
    _refuse_unequal(name, "the number of documents", len(a.documents), len(b.documents))
    for left, right in zip(a.documents, b.documents, strict=True):
        if (left["doc_id"], left.get("label")) != (right["doc_id"], right.get("label")):
            raise InputError(
                f"{name}: document {left['doc_id']} of A is another one in B; evaluate both with the same --requests, "
                "--limit and files"
            )
    features = [np.array([(one["score"], one.get("weight", 1.0)) for one in task.documents]) for task in (a, b)]
    sums = resampled_sums(np.concatenate(features, axis=1), draws, generator)  # of A's two columns, then B's two
    drawn = _quotient(sums[:, 2:]) - _quotient(sums[:, :2])
    values = [float(_quotient(rows.sum(0))) for rows in features]
    return _difference(name, a.metric, values, drawn, len(a.documents)), drawn


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
    """Return [draws, f]: the sums of the features [n, f] over n documents drawn with replacement, for each draw.

    Documents with equal features are one kind. How often each kind is drawn has a multinomial distribution, so that
    the cost does not depend on n if there are few kinds.
    """
    n = len(features_nf)
    kinds, counts = np.unique(features_nf, axis=0, return_counts=True)
    if len(kinds) <= MOST_KINDS:
        return generator.multinomial(n, counts / n, size=draws) @ kinds
    return np.array([features_nf[generator.integers(n, size=n)].sum(axis=0) for _ in range(draws)])


def _quotient(sums: np.ndarray) -> np.ndarray:
    """Divide scores by weights, [..., 2] -> [...]; 0 where the weight is 0, as is usual for F1."""
    scores, weights = sums[..., 0], sums[..., 1]
    return np.divide(scores, weights, out=np.zeros_like(scores), where=weights > 0)


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of the tables that show a comparison."""
    yield from (f"A: {comparison.a}", f"B: {comparison.b}")
    if comparison.tasks:
        rows = [
            (
                one.name,
                *(figure(one.metric, value) for value in (one.a, one.b)),
                figure(one.metric, one.difference, sign="+"),
                " to ".join(figure(one.metric, end, sign="+") for end in one.interval),
            )
            for one in (*comparison.tasks.values(), *filter(None, [comparison.mean]))
        ]
        yield from table(("task", "A", "B", "B − A", "95% interval"), rows, align="lrrrr")
    if comparison.perplexity:
        sets = [(name, f"{a:,.2f}", f"{b:,.2f}", f"{b - a:+,.2f}") for name, (a, b) in comparison.perplexity.items()]
        yield from table(("perplexity, without an interval", "A", "B", "B − A"), sets, align="lrrr")
