"""The result of an evaluation: what a file of it holds, written and read again.

A file of several checkpoints is a list of these, and one with a comparison {"results": such a list, "comparison": …}.
docs/evaluation.md has the keys.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from megatron_fanformer.checkpoint.run_folder import CHECKPOINTS
from megatron_fanformer.durable_files import regular_file, write_atomically
from megatron_fanformer.errors import CorruptError, InputError

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
    1 but for F1; `lengths` are what it divides log-probabilities by."""
    cut: int = 0
    """Requests, or prompts, whose beginning was cut to fit the model's context."""
    made_of: str | None = None
    """The SHA-256 of the file of a task of one's own; None for other tasks, and in a file of a version before this was
    written."""


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
    """Settings of the measurement; None in a file of a version before these were written."""
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


def names_of(results: Sequence[Result]) -> list[str]:
    """Return the checkpoints in headings: by step, with as much of the run's path as differs from the others'."""
    runs = short_names(result.run for result in results if result.run is not None)
    others = short_names(result.checkpoint for result in results if result.run is None)
    return [
        others[result.checkpoint]
        if result.run is None
        else f"{runs[result.run]}/{result.step:,}"
        if len(runs) > 1
        else f"{result.step:,}"
        for result in results
    ]


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """Return for each path as much of its end as tells it from the others."""
    parts = {path: Path(path).parts for path in paths}
    names: dict[str, str] = {}
    for depth in range(1, max(map(len, parts.values()), default=0) + 1):
        names = {path: "/".join(of_path[-depth:]) for path, of_path in parts.items()}
        if len(set(names.values())) == len(names):
            break
    return names


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
        content = regular_file(path, most_bytes=MOST_BYTES).read_bytes()
        decoded = msgspec.json.decode(content)
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
