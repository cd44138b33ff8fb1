"""Results of an evaluation: writes and reads their file, and prints their table. docs/evaluation.md has the keys."""

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
"""The metrics that are not shares of documents, but bits a byte or nats a character."""
MOST_BYTES = 1 << 30  # the paper's tasks whole are some 10 MB a checkpoint


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
    """Documents in the task's order. The metric is the sum of all `score` divided by the sum of all `weight`; except
    for F1 each `weight` is 1. `lengths` are the divisors of the log-probabilities."""
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
    """Number format in which the weights were run."""
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
    """The mean perplexity of each group whose sets are all there; None if it overflows a float."""


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
    """Return the only result in a file.

    Raises:
        InputError: the file cannot be opened, or holds anything but one result.
        CorruptError: the file is not valid JSON.
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
    """Return whether a metric is a share of documents, or F1: in [0, 1], and higher is better."""
    return metric not in LOWER_IS_BETTER


def figure(metric: str | None, value: float, *, sign: str = "") -> str:
    """Format a metric's value, or a difference of two values: shares in percent.

    Args:
        sign: "+" to print the sign of positive values, too.
    """
    scale, digits = (100, 2) if is_share(metric) else (1, 4)
    return f"{scale * value:{sign}.{digits}f}"


def result_lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines of a table: a column for each checkpoint, rows for tasks (their default metric) and for sets."""
    paths = [os.path.abspath(result.checkpoint) for result in results]
    common = os.path.commonpath(paths) if len(paths) > 1 else os.path.dirname(paths[0])
    columns = [_column(result) for result in results]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [(*label, *(column.get(label, "-") for column in columns)) for label in labels]
    heading = ("", "", *(os.path.relpath(path, common) for path in paths))
    yield from table(heading, rows, align="ll" + "r" * len(columns))


def _column(result: Result) -> dict[tuple[str, str], str]:
    """Return the cells of a checkpoint by name (of a task, a set or a mean) and metric."""
    cells = {}
    for name, task in result.tasks.items():
        measured = task.metrics[task.metric]
        value, error = (figure(task.metric, number) for number in (measured.value, measured.standard_error))
        cells[name, task.metric] = f"{value} ± {error}"
    shares = [task.metrics[task.metric].value for task in result.tasks.values() if is_share(task.metric)]
    if len(shares) > 1:
        cells["mean of tasks", ""] = f"{100 * sum(shares) / len(shares):.2f}"
    for name, of_set in result.perplexity.items():
        cells[name, "loss"] = f"{of_set.loss:.4f}"
        cells[name, "perplexity"] = _perplexity(of_set.perplexity)
        if of_set.bits_per_byte is not None:
            cells[name, "bits/byte"] = f"{of_set.bits_per_byte:.4f}"
    return cells | {(group, "mean perplexity"): _perplexity(mean) for group, mean in result.groups.items()}


def _perplexity(value: float | None) -> str:
    return "∞" if value is None or math.isinf(value) else f"{value:,.2f}"
