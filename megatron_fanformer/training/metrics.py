"""The metrics of a run's steps, each with all that is said or drawn of it; and the lines of metrics.jsonl.

The dashboards' groups and charts, the progress line and the tables in docs/metrics.md follow from `METRIC_TABLE`.
"""

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_fanformer.checkpoint.store import METRICS, metrics_entry
from megatron_fanformer.durable_files import regular_file

TAIL_BYTES = 1 << 20  # of metrics.jsonl: more than one step's metrics of any model

Group = Literal["train", "speed", "evaluation", "recovery", "health"]


class Chart(NamedTuple):
    """Several metrics in one picture, among TensorBoard's custom scalars."""

    category: str
    title: str


LOSSES = Chart("training", "loss, nats per token")
NORMS = Chart("training", "norms")
PHASES = Chart("health", "|phase| of the layer where it is largest")
UNITS = Chart("health", "share of periodic units, of the worst layer")


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, or all whose names differ in what stands for `NAME`."""

    name: str
    group: Group
    """Of a dashboard, which shows together what has the same first part."""
    text: str
    """What it is, for docs/metrics.md; pages by their path from the root, as in docstrings of fields."""
    unit: str = ""
    chart: Chart | None = None
    console: str | None = None
    """How the progress line shows it."""
    by_tokens: bool = False
    """Whether TensorBoard shows it by tokens, too."""


STRAGGLERS = "every `logging.straggler_interval` steps, in a run of several ranks (docs/clusters.md#slow-ranks)"
METRIC_TABLE = (
    Metric(name="step", group="train", text="steps from 1"),
    Metric(name="tokens", group="train", text="of all samples so far"),
    Metric(
        name="loss",
        group="train",
        unit="nats per token",
        text="mean cross entropy",
        chart=LOSSES,
        console="loss {:.4f}",
        by_tokens=True,
    ),
    Metric(name="grad_norm", group="train", text="norm of the gradient before clipping", chart=NORMS),
    Metric(
        name="params_norm",
        group="train",
        text="every `logging.norm_interval` steps: norm of all weights",
        chart=NORMS,
    ),
    Metric(
        name="update_norm",
        group="train",
        text="with it: norm of what the step has added to the weights",
        chart=NORMS,
    ),
    Metric(name="learning_rate", group="train", text="of the step"),
    Metric(
        name="skipped",
        group="train",
        text="the reason, in place of the loss, where a step was not taken (docs/recovery.md)",
    ),
    Metric(
        name="step_seconds",
        group="speed",
        unit="s",
        text="of computing and updating; evaluation and saving are not in it",
    ),
    Metric(
        name="tokens_per_second",
        group="speed",
        unit="tokens/s",
        text="of the same time; tokens are those with a loss, in fine-tuning the learned ones",
        console="{:,.0f} tokens/s",
    ),
    Metric(
        name="model_flops_per_second",
        group="speed",
        unit="FLOP/s",
        text="by the formula in `planning/flops.py`, over all ranks; within documents without attention's scores "
        "(docs/fine-tuning.md#attention-within-documents)",
    ),
    Metric(
        name="model_flops_utilization",
        group="speed",
        unit="share",
        text="that over what the chips could do by their data sheet, in the format of the products (that of FP8 in an "
        "FP8 run); left out where `planning/machines.yaml` does not know the chip",
    ),
    Metric(
        name="peak_memory_bytes",
        group="speed",
        unit="bytes",
        text="every `logging.norm_interval` steps: the most that any rank has held since its start; of a GPU what "
        "torch had allocated, of a CPU the whole process",
    ),
    Metric(name="work_seconds/median", group="speed", unit="s", text=f"a rank's own work, {STRAGGLERS}"),
    Metric(name="work_seconds/slowest", group="speed", unit="s", text="the same of the slowest rank"),
    Metric(name="wait_seconds/median", group="speed", unit="s", text="a rank's waiting for others, likewise"),
    Metric(name="wait_seconds/slowest", group="speed", unit="s", text="the same of the slowest rank"),
    Metric(name="slowest_rank", group="speed", text="its number"),
    Metric(
        name="validation_loss/NAME",
        group="evaluation",
        unit="nats per token",
        text="of a validation set, where the step evaluated (docs/evaluation.md#in-the-loop)",
        chart=LOSSES,
        by_tokens=True,
    ),
    Metric(
        name="eval/NAME/CrossEntropyLoss",
        group="evaluation",
        unit="nats per token",
        text="of a perplexity set, by OLMo's name, likewise",
        chart=LOSSES,
        by_tokens=True,
    ),
    Metric(
        name="eval/NAME/Perplexity",
        group="evaluation",
        text="of a perplexity set, or the mean of a group of them",
        by_tokens=True,
    ),
    Metric(
        name="eval/NAME/BitsPerByte",
        group="evaluation",
        unit="bits per byte",
        text="of a perplexity set",
        by_tokens=True,
    ),
    Metric(name="eval/downstream/NAME", group="evaluation", text="a task's own metric, by OLMo's name", by_tokens=True),
    Metric(
        name="eval/downstream_bpb/NAME",
        group="evaluation",
        unit="bits per byte",
        text="of a task's right answers, by OLMo's name",
        by_tokens=True,
    ),
    Metric(name="evaluation_seconds", group="evaluation", unit="s", text="of the evaluation after this step"),
    Metric(
        name="evaluation_share",
        group="evaluation",
        unit="share",
        text="of this start's time that evaluations have taken so far",
    ),
    Metric(
        name="recovery/NAME",
        group="recovery",
        text="totals, once a run has recovered from something (docs/recovery.md#the-record)",
    ),
    Metric(
        name="health/phase_p50",
        group="health",
        unit="rad",
        text="median of |p| over units and tokens",
        chart=PHASES,
    ),
    Metric(name="health/phase_p90", group="health", unit="rad", text="its 90th percentile", chart=PHASES),
    Metric(name="health/phase_p99", group="health", unit="rad", text="its 99th percentile", chart=PHASES),
    Metric(name="health/phase_max", group="health", unit="rad", text="the largest |p|", chart=PHASES),
    Metric(
        name="health/dead_units",
        group="health",
        unit="share",
        text="units that are dead: the distance of (cos p, sin p) from its mean over the tokens is below 2⁻⁸ (root "
        "mean square), which is the spacing of bf16's numbers just below 1",
        chart=UNITS,
    ),
    Metric(
        name="health/coarse_units",
        group="health",
        unit="share",
        text="units with a |p| of 16 or more. From there on bf16's numbers are 1/8 apart, so that rounding p moves "
        "it by 0.036 rad (root mean square), about what FP8 does to a phase of any size (docs/fp8-phase.md)",
        chart=UNITS,
    ),
    Metric(name="health/periodic_weight_norm", group="health", text="norm of W_p"),
    Metric(name="health/linear_weight_norm", group="health", text="norm of W_g"),
)
"""Every metric that a run may log."""


@functools.cache
def metric_of(name: str) -> Metric | None:
    """Return what the table has of a metric; None for one of another version."""
    return next((each for each in METRIC_TABLE if re.fullmatch(each.name.replace("NAME", ".+"), name)), None)


def dashboard_name(name: str) -> str:
    """Return a metric's name on a dashboard: its group comes first. (OLMo's names of evaluations begin with `eval/`)"""
    metric = metric_of(name)
    if metric is None:
        return name if "/" in name else f"train/{name}"
    return f"{metric.group}/{name.removeprefix('eval/').removeprefix(f'{metric.group}/')}"


def charts() -> dict[str, dict[str, list[str]]]:
    """Return the charts of several metrics: by category and title, regular expressions of dashboard names."""
    found: dict[str, dict[str, list[str]]] = {}
    for metric in METRIC_TABLE:
        if metric.chart is not None:
            titles = found.setdefault(metric.chart.category, {})
            titles.setdefault(metric.chart.title, []).append(dashboard_name(metric.name).replace("NAME", ".+"))
    return found


def console_text(metrics: dict[str, Any]) -> str:
    """Return what the progress line shows of a step."""
    shown = (metric for metric in METRIC_TABLE if metric.console is not None and metric.name in metrics)
    return "  ".join(str(metric.console).format(metrics[metric.name]) for metric in shown)


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a step; of a list by layer its largest."""
    largest = {name: max(value) if isinstance(value, list) and value else value for name, value in metrics.items()}
    return {name: value for name, value in largest.items() if isinstance(value, int | float)}


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The metrics of every step in a run's metrics.jsonl, in their order; lines that are not a step's are left out."""
    return [entry for line in (run / METRICS).read_bytes().splitlines() if (entry := metrics_entry(line)) is not None]


def last_metrics(run: Path) -> dict[str, Any] | None:
    """The metrics of the last step in a run's metrics.jsonl, of which only the end is read; None if there is none."""
    with regular_file(run / METRICS).open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = stream.read().split(b"\n")
    # after the last line end: a partial line, or nothing
    return next((entry for line in reversed(lines[:-1]) if (entry := metrics_entry(line)) is not None), None)
