"""Two models on the same documents: the difference of their metrics, with a 95% interval.

Documents differ from one another far more than two models do on one document, so that the difference is taken document
by document, and what is uncertain about it is which documents the task happens to have. That is what the bootstrap
draws: as many documents as there are, with replacement, ten thousand times (Efron and Tibshirani, An Introduction to
the Bootstrap, chapters 8 and 13: the percentile interval of paired data).
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from megatron_fanformer.errors import InputError
from megatron_fanformer.evaluation.results import Result, TaskResult
from megatron_fanformer.evaluation.tasks import GENERATED

DRAWS = 10_000
INTERVAL = (0.025, 0.975)
KINDS = 256  # up to so many kinds of documents, drawing numbers of each kind is cheaper than drawing documents
LOWER_IS_BETTER = {"bpb": "bits a byte", "bpb_with_space": "bits a byte", "ce_loss": "nats a character"}
"""The metrics that are not shares of documents, and their units."""
OF_TEXTS, OF_SAMPLES = ("temperature", "max_new_tokens"), ("num_samples", "top_k", "top_p")
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


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of B from A in one metric."""

    name: str
    metric: str
    a: float
    b: float
    low: float
    """Lower end of the 95% interval of b - a."""
    high: float
    standard_error: float
    """Standard error of b - a, by the same draws."""
    documents: int

    @property
    def value(self) -> float:
        """b - a."""
        return self.b - self.a

    @property
    def is_shown(self) -> bool:
        """Return whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


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
    sets = [name for name in a.perplexity if name in b.perplexity]
    if not common and not sets:
        raise InputError(
            f"{a.checkpoint} and {b.checkpoint} were evaluated on no task and no perplexity set in common; evaluate "
            "both on the same"
        )
    if sets:
        _refuse_other_tokens(a, b, sets)
    if generated := [name for name in common if a.tasks[name].metric in GENERATED]:
        _refuse_other_sampling(a, b, generated)
    differences, shares = [], []
    for name in common:
        # By its name: a task's draws do not depend on the others, and are not theirs.
        generator = np.random.default_rng((seed, zlib.crc32(name.encode())))
        found, drawn = _task_difference(name, a.tasks[name], b.tasks[name], draws, generator)
        differences.append(found)
        if is_share(found.metric):
            shares.append((found, drawn))
    mean = None
    if len(shares) > 1:
        mean = _difference(
            f"mean of {len(shares)} tasks",
            "",
            float(np.mean([found.a for found, _ in shares])),
            float(np.mean([found.b for found, _ in shares])),
            np.mean([drawn for _, drawn in shares], axis=0),
            sum(found.documents for found, _ in shares),
        )
    return Comparison(a=a, b=b, tasks=differences, mean=mean)


def _refuse_other_tokens(a: Result, b: Result, sets: list[str]) -> None:
    """Refuse perplexities of other tokens, or of tokens cut otherwise: they say nothing about two models."""
    if a.tokenizer != b.tokenizer:
        in_a, in_b = (f"{each.tokenizer[:12]}…" if each.tokenizer else "none" for each in (a, b))
        raise InputError(
            f"the tokenizer has SHA-256 {in_a} in A and {in_b} in B, so that the perplexities of {', '.join(sets)} are "
            "of different tokens; compare bits per byte by hand, or evaluate both on tasks alone"
        )
    for name in ("chunking", "chunk_tokens", "limit_tokens"):
        in_a, in_b = (getattr(each.settings, name, "not known") for each in (a, b))
        if in_a != in_b:
            raise InputError(
                f"--{name.replace('_', '-')} is {in_a} in A and {in_b} in B, so that the perplexities of "
                f"{', '.join(sets)} are of different tokens; evaluate both alike"
            )
    for name in sets:
        of_a, of_b = (each.perplexity[name].tokens for each in (a, b))
        if of_a != of_b:
            raise InputError(
                f"{name} has {of_a:,} scored tokens in A and {of_b:,} in B, not the same ones; evaluate both with the "
                "same files and --limit-tokens"
            )


def _refuse_other_sampling(a: Result, b: Result, tasks: list[str]) -> None:
    """Refuse answers that were not written alike: their difference is not the models' alone."""
    in_a, in_b = ({} if each.settings is None else each.settings.sampling for each in (a, b))
    is_greedy = in_a.get("temperature") == in_b.get("temperature") == 0
    for name in OF_TEXTS if is_greedy else (*OF_TEXTS, *OF_SAMPLES):
        values = [each.get(name, "not known") for each in (in_a, in_b)]
        if values[0] != values[1]:
            of_a, of_b = ("the tasks' own" if each is None else each for each in values)
            raise InputError(
                f"{', '.join(tasks)}: answers were written with --{name.replace('_', '-')} {of_a} in A and {of_b} in "
                "B; evaluate both alike"
            )


def is_share(metric: str) -> bool:
    """Return whether a metric is a share of documents, or F1: in [0, 1], and higher is better."""
    return metric not in LOWER_IS_BETTER


def _task_difference(
    name: str, a: TaskResult, b: TaskResult, draws: int, generator: np.random.Generator
) -> tuple[Difference, np.ndarray]:
    if a.metric != b.metric:
        raise InputError(f"{name} is measured by {a.metric} in A and by {b.metric} in B; evaluate both alike")
    in_a, in_b = _documents(name, a), _documents(name, b)
    _refuse_other_documents(name, in_a, in_b)
    if None not in (a.made_of, b.made_of) and a.made_of != b.made_of:
        raise InputError(f"{name} was made of {a.made_of} in A and of {b.made_of} in B; evaluate both on the same file")
    of_a, of_b = (np.array([(each.score, each.weight) for each in documents]) for documents in (in_a, in_b))
    drawn = resampled_sums(np.concatenate([of_a, of_b], axis=1), draws, generator)
    differences = _quotient(drawn[:, 2:]) - _quotient(drawn[:, :2])
    values = float(_quotient(of_a.sum(0))), float(_quotient(of_b.sum(0)))
    return _difference(name, a.metric, *values, differences, len(in_a)), differences


def _refuse_other_documents(name: str, in_a: Sequence[ScoredDocument], in_b: Sequence[ScoredDocument]) -> None:
    if [document.doc_id for document in in_a] != [document.doc_id for document in in_b]:
        raise InputError(
            f"{name} has {len(in_a)} documents in A and {len(in_b)} in B, not the same ones; evaluate both "
            "with the same --requests and --limit"
        )
    for of_a, of_b in zip(in_a, in_b, strict=True):
        if (of_a.label, of_a.rule) != (of_b.label, of_b.rule):
            raise InputError(
                f"document {of_a.doc_id} of {name} is another one in A than in B; evaluate both on the same file"
            )


def _difference(name: str, metric: str, a: float, b: float, drawn: np.ndarray, documents: int) -> Difference:
    low, high = np.quantile(drawn, INTERVAL)
    return Difference(
        name=name,
        metric=metric,
        a=a,
        b=b,
        low=float(low),
        high=float(high),
        standard_error=float(drawn.std()),
        documents=documents,
    )


def resampled_sums(features_nf: np.ndarray, draws: int, generator: np.random.Generator) -> np.ndarray:
    """Return [draws, f]: the sums of features over n documents that are drawn from the n with replacement, in each
    draw.

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
        found = msgspec.convert(task.documents, list[ScoredDocument])
    except msgspec.ValidationError as error:
        raise InputError(f"{name}: its documents cannot be compared ({error}); evaluate again") from None
    if not found:
        raise InputError(f"{name} has no documents in the result; evaluate again")
    return found


# -- in words


def sentence(found: Difference) -> str:
    """Return a difference in plain words."""
    unit = "points" if is_share(found.metric) else LOWER_IS_BETTER[found.metric]
    metric = f" ({found.metric})" if found.metric else ""
    value, low, high = (figure(found.metric, each, sign="+") for each in (found.value, found.low, found.high))
    interval = f"95% interval {low} to {high}; {found.documents:,} documents"
    if not found.is_shown:
        return f"{found.name}{metric}: no difference shown: {value} {unit}, {interval}."
    direction = "higher" if found.value > 0 else "lower"
    return f"{found.name}{metric}: B is {direction} by {figure(found.metric, abs(found.value))} {unit}, {interval}."


def figure(metric: str, value: float, *, sign: str = "") -> str:
    """Return a metric's value, or a difference of two, in print: shares in percent.

    Args:
        sign: "+" to print it for positive values, too.
    """
    scale, digits = (100, 2) if is_share(metric) else (1, 4)
    return f"{scale * value:{sign}.{digits}f}"
