"""Compares two models on the same documents: the difference of their metrics, with a 95% interval.

Scores vary far more between documents than between two models on one document. So the difference is taken document by
document, and its uncertainty comes from the choice of documents. The bootstrap repeats this choice ten thousand times:
each time it draws n of the n documents with replacement (Efron and Tibshirani, An Introduction to the Bootstrap,
chapters 8 and 13: the percentile interval of paired data).
"""

import zlib
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluate.results import Result, TaskResult, format_value, is_share
from megatron_fanformer.evaluate.tasks import GENERATED
from megatron_fanformer.options import option_name
from megatron_fanformer.terminal import table

DRAWS = 10_000
INTERVAL = (0.025, 0.975)
MOST_KINDS = 256  # of equal documents; for more it is cheaper to draw documents than to draw how often each kind occurs


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
    """Standard error of b - a, from the same draws as the interval."""
    documents: int


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of two results, as --output writes it."""

    a: str
    """The checkpoint of A; `b` is that of B."""
    b: str
    tasks: dict[str, Difference]
    mean: Difference | None
    """Mean difference over the tasks whose metric is a share of documents; None if there are fewer than two."""
    perplexity: dict[str, tuple[float, float]]
    """A's and B's perplexity of the sets and groups that both have. No interval: results have no losses by document."""


def compare(a: Result, b: Result, *, draws: int = DRAWS) -> Comparison:
    """Return the differences of two results in the tasks that both have, each in the task's default metric.

    Raises InputError if the results have no task and no perplexity set in common, or differ in the documents of a task,
    the tokens of a set, or the settings that their numbers depend on.
    """
    tasks = [name for name in a.tasks if name in b.tasks]
    sets = [name for name in a.perplexity if name in b.perplexity]
    if not tasks and not sets:
        raise InputError(
            f"{a.checkpoint} and {b.checkpoint} were evaluated on no task and no perplexity set in common; evaluate "
            "both on the same"
        )
    if sets:
        names = ", ".join(sets)
        _refuse_unequal(names, "the tokenizer", str(a.tokenizer)[:12], str(b.tokenizer)[:12])
        for field in ("chunk_tokens", "limit_tokens"):  # `settings` may be None
            _refuse_unequal(
                names, option_name(field), getattr(a.settings, field, None), getattr(b.settings, field, None)
            )
    for name in sets:
        _refuse_unequal(name, "the number of scored tokens", a.perplexity[name].tokens, b.perplexity[name].tokens)
    if generated := [name for name in tasks if a.tasks[name].metric in GENERATED]:
        in_a, in_b = (getattr(result.settings, "max_new_tokens", None) for result in (a, b))
        _refuse_unequal(", ".join(generated), "--max-new-tokens", in_a, in_b)
    differences: dict[str, Difference] = {}
    drawn: dict[str, np.ndarray] = {}  # by task, the difference in each draw
    for name in tasks:
        # Seeded by the task's name: tasks are drawn independently, and a result does not depend on the other tasks.
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
    """Return a task's difference, and the difference in each draw of documents, [draws]."""
    _refuse_unequal(name, "the metric", a.metric, b.metric)
    _refuse_unequal(name, "the number of documents", len(a.documents), len(b.documents))
    for left, right in zip(a.documents, b.documents, strict=True):  # documents of generation tasks have no label
        if (left["doc_id"], left.get("label")) != (right["doc_id"], right.get("label")):
            raise InputError(
                f"{name}: document {left['doc_id']} of A is another one in B; evaluate both with the same --requests, "
                "--limit and files"
            )
    terms = [np.array([(one["score"], one.get("weight", 1.0)) for one in task.documents]) for task in (a, b)]
    sums = resampled_sums(np.concatenate(terms, axis=1), draws, generator)  # A's score and weight, then B's
    drawn = _quotient(sums[:, 2:]) - _quotient(sums[:, :2])
    values = [float(_quotient(task_terms.sum(0))) for task_terms in terms]
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

    Documents with equal features are of one kind. The numbers of documents drawn of each kind have a multinomial
    distribution; to draw these numbers, if there are few kinds, costs the same for any n.
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
                format_value(one.metric, one.a),
                format_value(one.metric, one.b),
                format_value(one.metric, one.difference, sign="+"),
                " to ".join(format_value(one.metric, end, sign="+") for end in one.interval),
            )
            for one in (*comparison.tasks.values(), *filter(None, [comparison.mean]))
        ]
        yield from table(("task", "A", "B", "B − A", "95% interval"), rows, align="lrrrr")
    if comparison.perplexity:
        sets = [(name, f"{a:,.2f}", f"{b:,.2f}", f"{b - a:+,.2f}") for name, (a, b) in comparison.perplexity.items()]
        yield from table(("perplexity, without an interval", "A", "B", "B − A"), sets, align="lrrr")
