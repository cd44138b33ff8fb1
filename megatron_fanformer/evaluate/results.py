"""Results of an evaluation: their file, written and read again, their tables and their picture.

A file of several checkpoints is a list of these, and one with a comparison {"results": such a list, "comparison": …}.
docs/evaluation.md has the keys.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_fanformer.checkpoint.run_folder import CHECKPOINTS
from megatron_fanformer.durable_files import regular_file, write_atomically
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.pictures import drawn, set_logarithmic, use_many_colours
from megatron_fanformer.terminal import table

LOWER_IS_BETTER = {"bpb": "bits a byte", "bpb_with_space": "bits a byte", "ce_loss": "nats a character"}
"""The metrics that are not shares of documents, and their units."""
STANDARD_ERRORS = 1.96  # on either side of a value: 95% of a normal distribution
MOST_BYTES = 1 << 30  # the paper's tasks whole are some 10 MB a checkpoint


class MetricValue(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of a task: a share or F1 between 0 and 1, or bits or nats."""

    value: float
    standard_error: float
    documents: int


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a task."""

    metric: str
    """The task's default metric: the one to report and compare."""
    metrics: dict[str, MetricValue]
    documents: list[dict[str, Any]]
    """Documents in the task's order. The task's metric is the sum of their `score` by that of their `weight`, which is
    1 but for F1; `lengths` divide log-probabilities."""
    cut: int = 0
    """Requests, or prompts, whose beginning was cut to fit the model's context."""
    made_of: str | None = None
    """The SHA-256 of the file of a task of one's own; None for other tasks, and in files of older versions."""


class SetResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a perplexity set."""

    loss: float
    """Loss in nats per token."""
    perplexity: float | None
    """Perplexity; None if it overflows a float."""
    bits_per_byte: float | None
    tokens: int
    byte_perplexity: float | None = None
    word_perplexity: float | None = None
    """Perplexity of a word, by rolling windows; None otherwise, or if it overflows a float."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that a measurement's numbers depend on."""

    chunking: str
    chunk_tokens: int
    batch_tokens: int
    dtype: str
    """Number format in which the weights were run."""
    sampling: dict[str, Any]
    """Sampling settings of the texts that the model wrote."""
    limit_tokens: int | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluation of one checkpoint."""

    checkpoint: str
    step: int | None = None
    """Training step; None if the checkpoint's name does not state it."""
    versions: dict[str, str]
    tokenizer: str | None = None
    """SHA-256 of the tokenizer's file; None if none was needed."""
    settings: Settings | None = None
    """Settings of the measurement; None in files of older versions."""
    requests: str | None = None
    """SHA-256 of the request file; None if no task was requested."""
    tasks: dict[str, TaskResult] = {}
    perplexity: dict[str, SetResult] = {}
    groups: dict[str, float | None] = {}
    """The mean perplexity of each group whose sets are all there; None if it overflows a float."""

    @property
    def run(self) -> str | None:
        """Return the folder of the run that it is a checkpoint of; None for other models."""
        folder = Path(self.checkpoint).parent
        return str(folder.parent if folder.name == CHECKPOINTS else folder) if self.step is not None else None

    def headline(self, task: str) -> MetricValue:
        """Return a task's own metric."""
        return self.tasks[task].metrics[self.tasks[task].metric]


def mean_value(numerators: Sequence[float], denominators: Sequence[float] | None = None) -> MetricValue:
    """Return the quotient of two sums over documents, by default a mean, with its standard error.

    The error is the quotient's by the delta method, sqrt(Σ (a − M b)²) / Σ b; of a share p of n it is sqrt(p(1 − p)/n).
    Where there is nothing to divide by, as custom has it for F1, the value is 0.
    """
    a = np.asarray(numerators, dtype=np.float64)
    b = np.ones_like(a) if denominators is None else np.asarray(denominators, dtype=np.float64)
    total = b.sum()
    value = a.sum() / total if total else 0.0
    error = math.sqrt(((a - value * b) ** 2).sum()) / total if total else 0.0
    return MetricValue(value=float(value), standard_error=float(error), documents=len(a))


# -- files


def write_results(path: Path, results: Sequence[Result], comparison: dict[str, Any] | None = None) -> None:
    """Write one result as an object, several as a list, and with a comparison an object of both; atomically."""
    content: Any = results[0] if len(results) == 1 else list(results)
    if comparison is not None:
        content = {"results": list(results), "comparison": comparison}
    write_atomically(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def read_results(path: Path) -> list[Result]:
    """Return the results in a file.

    Raises:
        InputError: there is no such file, or it is not a result.
        CorruptError: it is not whole.
    """
    try:
        decoded = msgspec.json.decode(regular_file(path, most_bytes=MOST_BYTES).read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); name a result of evaluate --output") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{path} is not valid JSON ({error}); evaluate again") from None
    if isinstance(decoded, dict) and "comparison" in decoded:
        decoded = decoded.get("results")
    try:
        return msgspec.convert(decoded if isinstance(decoded, list) else [decoded], list[Result])
    except msgspec.ValidationError as error:
        raise InputError(f"{path} is not a result of evaluate ({error}); name one that --output wrote") from None


# -- tables


def is_share(metric: str | None) -> bool:
    """Return whether a metric is a share of documents, or F1: in [0, 1], and higher is better."""
    return metric not in LOWER_IS_BETTER


def figure(metric: str | None, value: float, *, sign: str = "") -> str:
    """Return a metric's value, or a difference of two, in print: shares in percent.

    Args:
        sign: "+" to print it for positive values, too.
    """
    scale, digits = (100, 2) if is_share(metric) else (1, 4)
    return f"{scale * value:{sign}.{digits}f}"


def names_of(results: Sequence[Result]) -> list[str]:
    """Return the checkpoints in headings: by step, with as much of the run's path as differs from the others'."""
    folders = short_names(result.run or result.checkpoint for result in results)
    names = []
    for result in results:
        folder = folders[result.run or result.checkpoint]
        step = f"{result.step:,}" if result.step is not None else ""
        names.append("/".join(filter(None, (folder, step))) if len(folders) > 1 or not step else step)
    return names


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """Return for each path as much of its end as tells it from the others."""
    parts = {path: Path(path).parts for path in paths}
    names: dict[str, str] = {}
    for depth in range(1, max(map(len, parts.values()), default=0) + 1):
        names = {path: "/".join(words[-depth:]) for path, words in parts.items()}
        if len(set(names.values())) == len(names):
            break
    return names


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


def _metric_rows(name: str, task: TaskResult) -> Iterator[tuple[str, ...]]:
    for metric, measured in sorted(task.metrics.items(), key=lambda item: item[0] != task.metric):
        value, error = figure(metric, measured.value), figure(metric, measured.standard_error)
        yield name if metric == task.metric else "", metric, value, error, f"{measured.documents:,}"


def _set_lines(result: Result) -> Iterator[str]:
    """Yield the table of sets, headed by how they were cut: the same model's bits per byte differ by it."""
    columns = [
        ("loss", [f"{measured.loss:.4f}" for measured in result.perplexity.values()]),
        ("perplexity", [_perplexity(measured.perplexity) for measured in result.perplexity.values()]),
        ("bits/byte", [_known(measured.bits_per_byte, "{:.4f}") for measured in result.perplexity.values()]),
    ]
    if any(measured.word_perplexity is not None for measured in result.perplexity.values()):
        columns += [
            ("per byte", [_known(measured.byte_perplexity, "{:,.4f}") for measured in result.perplexity.values()]),
            ("per word", [_known(measured.word_perplexity, "{:,.6g}") for measured in result.perplexity.values()]),
        ]
    columns.append(("tokens", [f"{measured.tokens:,}" for measured in result.perplexity.values()]))
    chunking = f" ({result.settings.chunking})" if result.settings else ""
    heading, values = zip((f"set{chunking}", list(result.perplexity)), *columns, strict=True)
    yield from table(heading, zip(*values, strict=True), align="l" + "r" * len(columns))


def _known(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


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


# -- the picture


def results_picture(results: Sequence[Result]) -> bytes:
    """Return a PNG with a line for each task and each set, of each run over its steps where all checkpoints have one.

    Args:
        results: of the same tasks and sets.
    """
    metrics = {name: task.metric for result in results for name, task in result.tasks.items()}
    shares = [name for name, metric in metrics.items() if is_share(metric)]
    others = [name for name in metrics if name not in shares]
    sets = list(dict.fromkeys(name for result in results for name in result.perplexity))
    titles = ("tasks, with 95% intervals", "percent"), ("tasks, with 95% intervals", "bits per byte, or nats")
    parts = [part for part in ((shares, *titles[0]), (others, *titles[1]), (sets, "perplexity", None)) if part[0]]

    def point(result: Result, name: str, unit: str | None) -> tuple[float | None, float]:
        if unit is None:
            return result.perplexity[name].perplexity, 0.0
        value, scale = result.headline(name), 100 if unit == "percent" else 1
        return scale * value.value, scale * STANDARD_ERRORS * value.standard_error

    def draw(panels: Any) -> None:
        for (names, title, unit), axes in zip(parts, panels[0], strict=True):
            use_many_colours(axes)
            for name in names:
                for line, placed in lines_of(results).items():
                    points = [(place, *point(result, name, unit)) for place, result in placed]
                    label = f"{name} ({line})" if line else name
                    axes.errorbar(*zip(*points, strict=True), label=label, marker=".", linewidth=1, elinewidth=0.5)
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
