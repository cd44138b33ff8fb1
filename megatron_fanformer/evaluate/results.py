"""The results of an evaluation: their file (docs/evaluation.md explains its keys) and their table."""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_fanformer.durable_files import regular_file, write_atomically
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.terminal import table

LOWER_IS_BETTER = ("bpb", "bpb_with_space", "ce_loss")
"""The metrics that are bits per byte or nats per character; all others are shares of documents or F1."""
MOST_BYTES = 1 << 30  # all documents of the paper's tasks take about 10 MB per checkpoint


class MetricValue(msgspec.Struct, frozen=True, kw_only=True):
    """The value of a task's metric: a share or F1 between 0 and 1, or bits or nats."""

    value: float
    standard_error: float
    documents: int


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a task."""

    metric: str
    """The task's default metric: the one to report and compare."""
    metrics: dict[str, MetricValue]
    documents: list[dict[str, Any]]
    """Documents in the task's order. The metric is the sum of all `score` divided by the sum of all `weight`; every
    `weight` is 1, except for F1. `lengths` are the numbers by which log-probabilities are divided."""
    cut: int = 0
    """The number of requests or prompts whose beginning was cut to fit the model's context."""


class SetResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a perplexity set."""

    loss: float
    """Loss in nats per token."""
    perplexity: float | None
    """Perplexity; None if it overflows a float."""
    bits_per_byte: float | None
    tokens: int


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that a measurement's numbers depend on."""

    chunk_tokens: int
    batch_tokens: int
    dtype: str
    """Number format of the weights in the forward passes."""
    limit_tokens: int | None = None
    max_new_tokens: int | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluation of one checkpoint."""

    checkpoint: str
    step: int | None = None
    """Training step; None if the checkpoint's name does not state it."""
    versions: dict[str, str]
    tokenizer: str | None = None
    """SHA-256 of the tokenizer's file; None if none was needed."""
    settings: Settings | None = None
    requests: str | None = None
    """SHA-256 of the request file; None if no task was requested."""
    tasks: dict[str, TaskResult] = {}
    perplexity: dict[str, SetResult] = {}
    groups: dict[str, float | None] = {}
    """The mean perplexity of each group of which all sets were measured; None if it overflows a float."""


def mean_value(numerators: Sequence[float], denominators: Sequence[float] | None = None) -> MetricValue:
    """Return the quotient M of two sums over documents, Σ a / Σ b (by default a mean), with its standard error.

    The standard error is sqrt(Σ (a − M b)²) / Σ b, by the delta method; for a share p of n it is sqrt(p(1 − p)/n). If
    the denominators b sum to 0, the value is 0, as is usual for F1.
    """
    a = np.asarray(numerators, dtype=np.float64)
    b = np.ones_like(a) if denominators is None else np.asarray(denominators, dtype=np.float64)
    total = b.sum()
    value = a.sum() / total if total else 0.0
    error = math.sqrt(((a - value * b) ** 2).sum()) / total if total else 0.0
    return MetricValue(value=float(value), standard_error=float(error), documents=len(a))


# -- files


def write_results(path: Path, content: Any) -> None:
    """Write a result, a list of them or a comparison as JSON, atomically."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def read_result(path: Path) -> Result:
    """Return the result in a file that holds exactly one.

    Raises InputError if the file cannot be opened or holds anything else, and CorruptError if it is not valid JSON.
    """
    try:
        return msgspec.convert(msgspec.json.decode(regular_file(path, most_bytes=MOST_BYTES).read_bytes()), Result)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); name a result of evaluate --output") from None
    except msgspec.ValidationError as error:
        raise InputError(
            f"{path} is not the result of one checkpoint ({error}); name one that evaluate --output wrote"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(f"{path} is not valid JSON ({error}); evaluate again") from None


# -- tables


def is_share(metric: str | None) -> bool:
    """Return whether a metric is a share of documents or F1, which lie in [0, 1]; None is a mean of such metrics."""
    return metric not in LOWER_IS_BETTER


def format_value(metric: str | None, value: float, *, sign: str = "") -> str:
    """Format a metric's value, or a difference of two values; shares in percent.

    Args:
        sign: "+" to show the sign of positive values, too.
    """
    scale, digits = (100, 2) if is_share(metric) else (1, 4)
    return f"{scale * value:{sign}.{digits}f}"


def result_lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of a table: a column for each checkpoint, a row for each task (in its default metric) and set."""
    paths = [os.path.abspath(result.checkpoint) for result in results]
    common = os.path.commonpath(paths) if len(paths) > 1 else os.path.dirname(paths[0])
    columns = [_column(result) for result in results]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [(*label, *(column.get(label, "-") for column in columns)) for label in labels]
    heading = ("", "", *(os.path.relpath(path, common) for path in paths))
    yield from table(heading, rows, align="ll" + "r" * len(columns))


def _column(result: Result) -> dict[tuple[str, str], str]:
    """Return a checkpoint's cells by their two labels: the name of a task, a set or a mean, and the metric."""
    cells = {}
    for name, task in result.tasks.items():
        measured = task.metrics[task.metric]
        value, error = (format_value(task.metric, number) for number in (measured.value, measured.standard_error))
        cells[name, task.metric] = f"{value} ± {error}"
    shares = [task.metrics[task.metric].value for task in result.tasks.values() if is_share(task.metric)]
    if len(shares) > 1:
        cells["mean of tasks", ""] = f"{100 * sum(shares) / len(shares):.2f}"
    for name, set_result in result.perplexity.items():
        cells[name, "loss"] = f"{set_result.loss:.4f}"
        cells[name, "perplexity"] = _format_perplexity(set_result.perplexity)
        if set_result.bits_per_byte is not None:
            cells[name, "bits/byte"] = f"{set_result.bits_per_byte:.4f}"
    return cells | {(group, "mean perplexity"): _format_perplexity(mean) for group, mean in result.groups.items()}


def _format_perplexity(value: float | None) -> str:
    return "∞" if value is None or math.isinf(value) else f"{value:,.2f}"
