"""The result of an evaluation: what a file of it holds, written and read again.

    {"checkpoint": "runs/a/checkpoints/step-00001000", "step": 1000,
     "versions": {"megatron_fanformer": …},
     "requests": the SHA-256 of the request file, or null,
     "tasks": {NAME: {"metric": the task's own,
                      "metrics": {NAME: {"value", "standard_error", "documents"}},
                      "documents": [{"doc_id", "label", "log_probabilities": [one of each choice], "lengths": […],
                                     "score", "weight"}],
                      "cut": requests, or prompts, that lost their beginning}},
     "perplexity": {SET: {"loss", "perplexity", "bits_per_byte", "tokens"}},
     "groups": {GROUP: the mean of its sets' perplexities}}

A file of several checkpoints is a list of these. A task's own metric is the sum of its documents' `score` by that of
their `weight`, which is 1 but for F1; `lengths` are what it divides log-probabilities by. Generation tasks have
what was written in a document, in place of log-probabilities.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_fanformer.durable_files import regular_file, write_atomically
from megatron_fanformer.errors import CorruptError, InputError

MOST_BYTES = 1 << 30  # the paper's tasks whole are some 10 MB a checkpoint


class MetricValue(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of a task."""

    value: float
    standard_error: float
    documents: int


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a task came to."""

    metric: str
    """The task's own: the one to report and compare."""
    metrics: dict[str, MetricValue]
    documents: list[dict[str, Any]]
    """In the task's order."""
    cut: int = 0
    """Requests, or prompts, that lost their beginning to the model's context."""


class SetResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a perplexity set came to."""

    loss: float
    """Nats a token."""
    perplexity: float | None
    """None where it is beyond a float."""
    bits_per_byte: float | None
    tokens: int


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The evaluation of one checkpoint."""

    checkpoint: str
    step: int | None = None
    """None where the checkpoint's name does not say it."""
    versions: dict[str, str]
    requests: str | None = None
    """SHA-256 of the request file; None where no task was asked for."""
    tasks: dict[str, TaskResult] = {}
    perplexity: dict[str, SetResult] = {}
    groups: dict[str, float | None] = {}
    """The mean perplexity of each group whose sets are all there; None where it is beyond a float."""

    @property
    def name(self) -> str:
        """The checkpoint in a table's heading: its step, or its folder's name."""
        return f"{self.step:,}" if self.step is not None else Path(self.checkpoint).name

    def headline(self, task: str) -> MetricValue:
        """A task's own metric."""
        return self.tasks[task].metrics[self.tasks[task].metric]


def write_results(path: Path, results: Sequence[Result]) -> None:
    """Write one result as an object, several as a list; atomically."""
    content = results[0] if len(results) == 1 else list(results)
    write_atomically(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def read_results(path: Path) -> list[Result]:
    """The results in a file.

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
    try:
        return msgspec.convert(decoded if isinstance(decoded, list) else [decoded], list[Result])
    except msgspec.ValidationError as error:
        raise InputError(f"{path} is not a result of evaluate ({error}); name one that --output wrote") from None
