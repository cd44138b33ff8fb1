"""The results of an evaluation and of a comparison: as tables for the terminal, and as plain values for a file."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_fanformer.evaluation.comparison import Comparison, Difference, figure, is_share, sentences
from megatron_fanformer.evaluation.results import MetricValue, Result, names_of

MOST_COLUMNS = 5  # checkpoints side by side in 80 columns; more follow in further tables


def print_results(results: Sequence[Result], console: Console) -> None:
    """One checkpoint with all its results; of several a row for each task and set, a column for each."""
    if len(results) == 1:
        _print_one(results[0], console)
        return
    names = names_of(results)
    are_steps = len({result.run for result in results}) == 1 and results[0].run is not None
    for first in range(0, len(results), MOST_COLUMNS):
        end = first + MOST_COLUMNS
        _print_side_by_side("step" if are_steps else "", names[first:end], results[first:end], console)


def _print_one(result: Result, console: Console) -> None:
    console.print(result.checkpoint, highlight=False, soft_wrap=True)
    if result.tasks:
        table = _table("task", "metric", "value", "±", "documents", left=2)
        for name, task in result.tasks.items():
            for metric, found in sorted(task.metrics.items(), key=lambda item: item[0] != task.metric):
                is_own = metric == task.metric
                table.add_row(name if is_own else "", metric, *_cells(metric, found), style=None if is_own else "dim")
        console.print(table)
        if (mean := _mean(result)) is not None:
            console.print(f"mean of the tasks' own metrics: {100 * mean:.2f}", highlight=False)
    if result.perplexity:
        table = _table("set", "loss", "perplexity", "bits/byte", "tokens")
        for name, each in result.perplexity.items():
            bits = "-" if each.bits_per_byte is None else f"{each.bits_per_byte:.4f}"
            table.add_row(name, f"{each.loss:.4f}", _perplexity(each.perplexity), bits, f"{each.tokens:,}")
        console.print(table)
    for group, mean in result.groups.items():
        console.print(f"{group}: mean perplexity {_perplexity(mean)}", highlight=False)


def _print_side_by_side(corner: str, names: Sequence[str], results: Sequence[Result], console: Console) -> None:
    columns = [_column(result) for result in results]
    table = _table(corner, *names)
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "-") for column in columns))
    console.print(table)


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


def _table(*headings: str, left: int = 1) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < left else "right", overflow="fold")
    return table


def _cells(metric: str, found: MetricValue) -> tuple[str, str, str]:
    """Value, standard error and documents; shares in percent."""
    return figure(metric, found.value), figure(metric, found.standard_error), f"{found.documents:,}"


def _perplexity(value: float | None) -> str:
    return "∞" if value is None or math.isinf(value) else f"{value:,.2f}"


# -- comparisons


def print_comparison(comparison: Comparison, console: Console) -> None:
    """The table, and a sentence for each task."""
    for letter, result in (("A", comparison.a), ("B", comparison.b)):
        console.print(f"{letter}: {result.checkpoint}", highlight=False, soft_wrap=True)
    table = _table("task", "A", "B", "B − A", "95% interval")
    for found in _differences(comparison):
        value, low, high = (figure(found.metric, each, sign="+") for each in (found.value, found.low, found.high))
        table.add_row(
            found.name, figure(found.metric, found.a), figure(found.metric, found.b), value, f"{low} to {high}"
        )
    if comparison.tasks:
        console.print(table)
    if rows := perplexity_differences(comparison):
        table = _table("perplexity, without an interval", "A", "B", "B − A")
        for name, row in rows.items():
            table.add_row(name, *(f"{row[key]:,.2f}" for key in ("a", "b")), f"{row['difference']:+,.2f}")
        console.print(table)
    for sentence in sentences(comparison):
        console.print(sentence, highlight=False)


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
