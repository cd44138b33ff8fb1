"""The results of an evaluation and of a comparison: as lines for the terminal, plain values for a file, a picture."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_fanformer.evaluate.comparison import Comparison, figure, is_share, sentence
from megatron_fanformer.evaluate.results import Result, TaskResult, names_of, short_names
from megatron_fanformer.pictures import drawn, set_logarithmic, use_many_colours
from megatron_fanformer.terminal import table

STANDARD_ERRORS = 1.96  # on either side of a value: 95% of a normal distribution


def result_lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield one checkpoint with all its results; for several, a row per task and set, with a column per checkpoint."""
    if len(results) == 1:
        yield from _one(results[0])
        return
    columns = [_column(result) for result in results]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [(label, *(column.get(label, "-") for column in columns)) for label in labels]
    are_steps = len({result.run for result in results}) == 1 and results[0].run is not None
    yield from table(("step" if are_steps else "", *names_of(results)), rows, align="l" + "r" * len(columns))


def _one(result: Result) -> Iterator[str]:
    yield result.checkpoint
    if result.tasks:
        rows = [row for name, task in result.tasks.items() for row in _metric_rows(name, task)]
        yield from table(("task", "metric", "value", "±", "documents"), rows, align="llrrr")
        if (mean := _mean(result)) is not None:
            yield f"mean of the tasks' own metrics: {100 * mean:.2f}"
    if result.perplexity:
        yield from _set_lines(result)
    for group, mean in result.groups.items():
        yield f"{group}: mean perplexity {_perplexity(mean)}"


def _set_lines(result: Result) -> Iterator[str]:
    """Yield the table of sets, headed by how they were cut: the same model's bits per byte differ by it."""
    chunking = f" ({result.settings.chunking})" if result.settings else ""
    with_words = any(measured.word_perplexity is not None for measured in result.perplexity.values())
    rows = [
        (
            name,
            f"{measured.loss:.4f}",
            _perplexity(measured.perplexity),
            "-" if measured.bits_per_byte is None else f"{measured.bits_per_byte:.4f}",
            *(_known(measured.byte_perplexity, "{:,.4f}"), _known(measured.word_perplexity, "{:,.6g}")) * with_words,
            f"{measured.tokens:,}",
        )
        for name, measured in result.perplexity.items()
    ]
    heading = ("loss", "perplexity", "bits/byte", *("per byte", "per word") * with_words, "tokens")
    yield from table((f"set{chunking}", *heading), rows, align="l" + "r" * len(heading))


def _known(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _metric_rows(name: str, task: TaskResult) -> Iterator[tuple[str, ...]]:
    for metric, measured in sorted(task.metrics.items(), key=lambda item: item[0] != task.metric):
        value, error = figure(metric, measured.value), figure(metric, measured.standard_error)
        yield name if metric == task.metric else "", metric, value, error, f"{measured.documents:,}"


def _column(result: Result) -> dict[str, str]:
    cells = {
        f"{name} {task.metric}": figure(task.metric, result.headline(name).value) for name, task in result.tasks.items()
    }
    if (mean := _mean(result)) is not None:
        cells["mean of tasks"] = f"{100 * mean:.2f}"
    cells |= {name: _perplexity(loss.perplexity) for name, loss in result.perplexity.items()}
    return cells | {f"{group} mean": _perplexity(mean) for group, mean in result.groups.items()}


def _mean(result: Result) -> float | None:
    """Average the tasks' own metrics, where they are shares; None below two."""
    shares = [result.headline(name).value for name, task in result.tasks.items() if is_share(task.metric)]
    return sum(shares) / len(shares) if len(shares) > 1 else None


def _perplexity(value: float | None) -> str:
    return "∞" if value is None or math.isinf(value) else f"{value:,.2f}"


# -- comparisons


def comparison_lines(comparison: Comparison) -> Iterator[str]:
    """Yield the tables, and a sentence for each task."""
    for letter, result in (("A", comparison.a), ("B", comparison.b)):
        yield f"{letter}: {result.checkpoint}"
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
    """Return A's and B's perplexity of the sets and groups that both have. (A result has no losses of single
    documents.)
    """
    a, b = comparison.a, comparison.b
    pairs = {
        name: (of_a.perplexity, b.perplexity[name].perplexity)
        for name, of_a in a.perplexity.items()
        if name in b.perplexity
    }
    pairs |= {f"{group} mean": (mean, b.groups[group]) for group, mean in a.groups.items() if group in b.groups}
    return {
        name: {"a": of_a, "b": of_b, "difference": of_b - of_a}
        for name, (of_a, of_b) in pairs.items()
        if of_a is not None and of_b is not None
    }


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


# -- the picture


def results_picture(results: Sequence[Result]) -> bytes:
    """Return a PNG with a line for each task and each set, of each run over its steps where all checkpoints have
    one.
    """
    metrics = {name: task.metric for result in results for name, task in result.tasks.items()}
    shares = [name for name, metric in metrics.items() if is_share(metric)]
    others = [name for name in metrics if name not in shares]
    sets = list(dict.fromkeys(name for result in results for name in result.perplexity))
    titles = ("tasks, with 95% intervals", "percent"), ("tasks, with 95% intervals", "bits per byte, or nats")
    parts = [part for part in ((shares, *titles[0]), (others, *titles[1]), (sets, "perplexity", None)) if part[0]]

    def draw(panels: Any) -> None:
        for (names, title, unit), axes in zip(parts, panels[0], strict=True):
            use_many_colours(axes)
            for name in names:
                for line, placed in lines_of(results).items():
                    label = f"{name} ({line})" if line else name
                    if unit is None:
                        points = [(place, r.perplexity[name].perplexity) for place, r in placed if name in r.perplexity]
                        axes.plot(*zip(*points, strict=True), label=label, marker=".", linewidth=1)
                        continue
                    scale = 100 if unit == "percent" else 1
                    values = [(place, r.headline(name)) for place, r in placed if name in r.tasks]
                    axes.errorbar(
                        [place for place, _ in values],
                        [scale * value.value for _, value in values],
                        [scale * STANDARD_ERRORS * value.standard_error for _, value in values],
                        label=label,
                        marker=".",
                        linewidth=1,
                        elinewidth=0.5,
                    )
            axes.set(title=title, ylabel=unit)
            if unit is None:
                set_logarithmic(axes.yaxis)
            if all(result.step is not None for result in results):
                axes.set_xlabel("step")
            else:
                axes.set_xticks(range(len(results)), names_of(results), rotation=20)
            axes.legend(fontsize="x-small", bbox_to_anchor=(0.5, -0.14), loc="upper center", ncols=2)

    return drawn(draw, columns=len(parts), grows=True)


def lines_of(results: Sequence[Result]) -> dict[str, list[tuple[int, Result]]]:
    """Return, by their labels in the legend, the checkpoints of each run with their steps, in order of these.

    Where one has no step, all are one line, at their numbers.
    """
    steps = [(result.step, result) for result in results if result.step is not None]
    if len(steps) < len(results):
        return {"": list(enumerate(results))}
    runs = short_names(str(result.run) for result in results)
    return {
        name if len(runs) > 1 else "": sorted(
            ((step, result) for step, result in steps if result.run == run), key=lambda one: one[0]
        )
        for run, name in runs.items()
    }
