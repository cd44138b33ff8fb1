"""The results of an evaluation and of a comparison: as lines for the terminal, and as plain values for a file."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_fanformer.evaluation.comparison import Comparison, Difference, figure, is_share, sentences
from megatron_fanformer.evaluation.results import MetricValue, Result, TaskResult, names_of
from megatron_fanformer.terminal import table

MOST_COLUMNS = 5  # checkpoints side by side in 80 columns; more follow in further tables


def result_lines(results: Sequence[Result], width: int | None) -> Iterator[str]:
    """One checkpoint with all its results; of several a row for each task and set, a column for each.

    Args:
        width: of the terminal; None: any.
    """
    if len(results) == 1:
        yield from _one(results[0], width)
        return
    names = names_of(results)
    are_steps = len({result.run for result in results}) == 1 and results[0].run is not None
    for first in range(0, len(results), MOST_COLUMNS):
        end = first + MOST_COLUMNS
        yield from _side_by_side("step" if are_steps else "", names[first:end], results[first:end], width)


def _one(result: Result, width: int | None) -> Iterator[str]:
    yield result.checkpoint
    if result.tasks:
        rows = [row for name, task in result.tasks.items() for row in _metric_rows(name, task)]
        yield from table(("task", "metric", "value", "±", "documents"), rows, align="llrrr", width=width)
        if (mean := _mean(result)) is not None:
            yield f"mean of the tasks' own metrics: {100 * mean:.2f}"
    if result.perplexity:
        rows = [
            (
                name,
                f"{each.loss:.4f}",
                _perplexity(each.perplexity),
                "-" if each.bits_per_byte is None else f"{each.bits_per_byte:.4f}",
                f"{each.tokens:,}",
            )
            for name, each in result.perplexity.items()
        ]
        yield from table(("set", "loss", "perplexity", "bits/byte", "tokens"), rows, align="lrrrr", width=width)
    for group, mean in result.groups.items():
        yield f"{group}: mean perplexity {_perplexity(mean)}"


def _metric_rows(name: str, task: TaskResult) -> Iterator[tuple[str, ...]]:
    """The task's own metric first."""
    for metric, found in sorted(task.metrics.items(), key=lambda item: item[0] != task.metric):
        yield (name if metric == task.metric else "", metric, *_cells(metric, found))


def _side_by_side(corner: str, names: Sequence[str], results: Sequence[Result], width: int | None) -> Iterator[str]:
    found = [_column(result) for result in results]
    labels = dict.fromkeys(label for column in found for label in column)
    rows = [(label, *(column.get(label, "-") for column in found)) for label in labels]
    yield from table((corner, *names), rows, align="l" + "r" * len(names), width=width)


def _column(result: Result) -> dict[str, str]:
    """The results of a checkpoint, by task with its own metric, set and group."""
    cells = {
        f"{name} {task.metric}": _cells(task.metric, result.headline(name))[0] for name, task in result.tasks.items()
    }
    if (mean := _mean(result)) is not None:
        cells["mean of tasks"] = f"{100 * mean:.2f}"
    cells |= {name: _perplexity(found.perplexity) for name, found in result.perplexity.items()}
    return cells | {f"{group} mean": _perplexity(mean) for group, mean in result.groups.items()}


def _mean(result: Result) -> float | None:
    """Of the tasks' own metrics, where they are shares; None below two."""
    shares = [result.headline(name).value for name, task in result.tasks.items() if is_share(task.metric)]
    return sum(shares) / len(shares) if len(shares) > 1 else None


def _cells(metric: str, found: MetricValue) -> tuple[str, str, str]:
    """Value, standard error and documents; shares in percent."""
    return figure(metric, found.value), figure(metric, found.standard_error), f"{found.documents:,}"


def _perplexity(value: float | None) -> str:
    return "∞" if value is None or math.isinf(value) else f"{value:,.2f}"


# -- comparisons


def comparison_lines(comparison: Comparison, width: int | None) -> Iterator[str]:
    """The tables, and a sentence for each task."""
    for letter, result in (("A", comparison.a), ("B", comparison.b)):
        yield f"{letter}: {result.checkpoint}"
    if comparison.tasks:
        rows = [_difference_cells(found) for found in _differences(comparison)]
        yield from table(("task", "A", "B", "B − A", "95% interval"), rows, align="lrrrr", width=width)
    if differences := perplexity_differences(comparison):
        rows = [
            (name, f"{row['a']:,.2f}", f"{row['b']:,.2f}", f"{row['difference']:+,.2f}")
            for name, row in differences.items()
        ]
        yield from table(("perplexity, without an interval", "A", "B", "B − A"), rows, align="lrrr", width=width)
    yield from sentences(comparison)


def _difference_cells(found: Difference) -> tuple[str, ...]:
    of_a, of_b = (figure(found.metric, each) for each in (found.a, found.b))
    value, low, high = (figure(found.metric, each, sign="+") for each in (found.value, found.low, found.high))
    return found.name, of_a, of_b, value, f"{low} to {high}"


def _differences(comparison: Comparison) -> list[Difference]:
    return [*comparison.tasks, *([comparison.mean] if comparison.mean else [])]


def perplexity_differences(comparison: Comparison) -> dict[str, dict[str, float]]:
    """A's and B's perplexity of the sets and groups that both have. (A result has no losses of single documents.)"""
    a, b = comparison.a, comparison.b
    pairs = {
        name: (found.perplexity, b.perplexity[name].perplexity)
        for name, found in a.perplexity.items()
        if name in b.perplexity
    }
    pairs |= {f"{group} mean": (mean, b.groups[group]) for group, mean in a.groups.items() if group in b.groups}
    return {
        name: {"a": of_a, "b": of_b, "difference": of_b - of_a}
        for name, (of_a, of_b) in pairs.items()
        if of_a is not None and of_b is not None
    }


def comparison_values(comparison: Comparison) -> dict[str, Any]:
    """A comparison as a file has it; differences are B − A."""
    return {
        "a": comparison.a.checkpoint,
        "b": comparison.b.checkpoint,
        "tasks": {found.name: _values(found) for found in comparison.tasks},
        "mean": None if comparison.mean is None else _values(comparison.mean),
        "perplexity": perplexity_differences(comparison),
        "sentences": list(sentences(comparison)),
    }


def _values(found: Difference) -> dict[str, Any]:
    return {
        "metric": found.metric or None,
        "a": found.a,
        "b": found.b,
        "difference": found.value,
        "interval": [found.low, found.high],
        "standard_error": found.standard_error,
        "documents": found.documents,
    }
