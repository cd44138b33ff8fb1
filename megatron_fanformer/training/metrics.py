"""The metrics of a run's steps, each with all that is said or drawn of it; and the lines of metrics.jsonl.

The dashboards' groups and charts, the progress line and the tables in docs/metrics.md follow from `METRIC_TABLE`.
"""

import functools
import os
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_fanformer.checkpoint.store import METRICS, VALIDATION_LOSS, metrics_entry
from megatron_fanformer.durable_files import regular_file

VALIDATION_PREFIX = f"{VALIDATION_LOSS}/"  # begins the name of a validation set's loss
PERPLEXITY_LOSS_SUFFIX = "/CrossEntropyLoss"  # ends the name of a perplexity set's loss
TAIL_BYTES = 1 << 20  # of metrics.jsonl: more than one step's metrics of any model

Group = Literal["train", "data", "speed", "evaluation", "recovery", "health"]


class Chart(NamedTuple):
    """Several metrics in one picture, among TensorBoard's custom scalars."""

    category: str
    title: str


LOSSES = Chart("training", "loss, nats per token")
NORMS = Chart("training", "norms")
PHASES = Chart("health", "|phase| of the layer where it is largest")
UNITS = Chart("health", "share of periodic units, of the worst layer")


class Metric(NamedTuple):
    """One metric, or all whose names differ in what stands for `NAME`."""

    name: str
    group: Group
    """Its group on a dashboard, which shows names with the same first part together."""
    unit: str
    text: str
    """Its description in docs/metrics.md; pages are named by their paths from the root, as in docstrings of fields."""
    chart: Chart | None = None
    console: str | None = None
    """Its format on the progress line."""
    by_tokens: bool = False
    """Whether TensorBoard shows it by tokens, too."""


STRAGGLERS = "every `logging.straggler_interval` steps, in a run of several ranks (docs/clusters.md#slow-ranks)"
METRIC_TABLE = (
    Metric("step", "train", "", "steps from 1"),
    Metric("tokens", "train", "", "of all samples so far"),
    Metric(
        "loss", "train", "nats per token", "mean cross entropy", chart=LOSSES, console="loss {:.4f}", by_tokens=True
    ),
    Metric(
        "z_loss",
        "train",
        "nats per token",
        "with `training.z_loss_coefficient`: mean of the z-loss, which `loss` does not count",
    ),
    Metric("grad_norm", "train", "", "norm of the gradient before clipping", chart=NORMS),
    Metric("params_norm", "train", "", "every `logging.norm_interval` steps: norm of all weights", chart=NORMS),
    Metric("update_norm", "train", "", "at the same steps: norm of the step's change of the weights", chart=NORMS),
    Metric("learning_rate", "train", "", "learning rate of the step"),
    Metric("skipped", "train", "", "the reason, in place of the loss, where a step was not taken (docs/recovery.md)"),
    Metric(
        "masked_share",
        "data",
        "share",
        "with `data.mask_repeated_ngrams`: labels of the step without a loss; of `.npy` files the last of each sample,"
        " too",
    ),
    Metric(
        "data/NAME/tokens",
        "data",
        "",
        "every `logging.source_interval` steps and after the last: tokens of a source that were trained on so far, "
        "without those of skipped steps; NAME is its path, below the folder of all sources",
    ),
    Metric("data/NAME/epochs", "data", "", "the same in epochs of that source"),
    Metric("step_seconds", "speed", "s", "time of computing and updating, without evaluation and saving"),
    Metric(
        "tokens_per_second",
        "speed",
        "tokens/s",
        "over the same time; only tokens with a loss count, in fine-tuning the learned ones",
        console="{:,.0f} tokens/s",
    ),
    Metric(
        "model_flops_per_second",
        "speed",
        "FLOP/s",
        "by the formula in `planning/flops.py`, over all ranks; within documents without attention's scores "
        "(docs/fine-tuning.md#attention-within-documents)",
    ),
    Metric(
        "model_flops_utilization",
        "speed",
        "share",
        "that rate over the chips' rate by their data sheet, in the format of the products (that of FP8 in an "
        "FP8 run); left out where `planning/machines.yaml` does not know the chip",
    ),
    Metric(
        "peak_memory_bytes",
        "speed",
        "bytes",
        "every `logging.norm_interval` steps: the most that any rank has held since its start; on a GPU what torch"
        " had allocated, on a CPU the whole process",
    ),
    Metric("work_seconds/median", "speed", "s", f"a rank's forward and backward, {STRAGGLERS}"),
    Metric("work_seconds/slowest", "speed", "s", "the same of the slowest rank"),
    Metric("slowest_rank", "speed", "", "its number"),
    Metric(
        "validation_loss/NAME",
        "evaluation",
        "nats per token",
        "loss on a validation set, if the step evaluated (docs/evaluation.md#in-the-loop)",
        chart=LOSSES,
        by_tokens=True,
    ),
    Metric(
        "eval/NAME/CrossEntropyLoss",
        "evaluation",
        "nats per token",
        "loss on a perplexity set, by OLMo's name, if the step evaluated",
        chart=LOSSES,
        by_tokens=True,
    ),
    Metric(
        "eval/NAME/Perplexity", "evaluation", "", "perplexity of a set, or the mean of a group of sets", by_tokens=True
    ),
    Metric("eval/NAME/BitsPerByte", "evaluation", "bits per byte", "bits per byte of a perplexity set", by_tokens=True),
    Metric("eval/downstream/NAME", "evaluation", "", "a task's own metric, by OLMo's name", by_tokens=True),
    Metric(
        "eval/downstream_bpb/NAME",
        "evaluation",
        "bits per byte",
        "bits per byte of a task's right answers, by OLMo's name",
        by_tokens=True,
    ),
    Metric("evaluation_seconds", "evaluation", "s", "time of the evaluation after this step"),
    Metric("evaluation_share", "evaluation", "share", "share of the time since this start that evaluations have taken"),
    Metric(
        "recovery/NAME", "recovery", "", "totals, once a run has recovered from something (docs/recovery.md#the-record)"
    ),
    Metric("health/phase_p50", "health", "rad", "median of |p| over units and tokens", chart=PHASES),
    Metric("health/phase_p90", "health", "rad", "its 90th percentile", chart=PHASES),
    Metric("health/phase_p99", "health", "rad", "its 99th percentile", chart=PHASES),
    Metric("health/phase_max", "health", "rad", "the largest |p|", chart=PHASES),
    Metric(
        "health/dead_units",
        "health",
        "share",
        "units that are dead: the distance of (cos p, sin p) from its mean over the tokens is below 2⁻⁸ (root mean"
        " square), which is the spacing of bf16's numbers just below 1",
        chart=UNITS,
    ),
    Metric(
        "health/coarse_units",
        "health",
        "share",
        "units with a |p| of 16 or more. From there on bf16's numbers are 1/8 apart, so that rounding p moves it "
        "by 0.036 rad (root mean square), about what FP8 does to a phase of any size (docs/fp8-phase.md)",
        chart=UNITS,
    ),
    Metric("health/periodic_weight_norm", "health", "", "norm of W_p"),
    Metric("health/linear_weight_norm", "health", "", "norm of W_g"),
)
"""Every metric that a run may log."""


@functools.cache
def metric_of(name: str) -> Metric | None:
    """Return what the table has of a metric; None for one of another version."""
    return next((each for each in METRIC_TABLE if re.fullmatch(each.name.replace("NAME", ".+"), name)), None)


def dashboard_name(name: str) -> str:
    """Return a metric's name on a dashboard: its group comes first. (OLMo's names of evaluations begin with `eval/`)

    Dashboards sort groups by name: those beside `train` are called `train_data`, `validation` and so on, behind it.
    """
    metric = metric_of(name)
    if metric is None:
        return name if "/" in name else f"train/{name}"
    group = {"train": "train", "evaluation": "validation"}.get(metric.group, f"train_{metric.group}")
    return f"{group}/{name.removeprefix('eval/').removeprefix(f'{metric.group}/')}"


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
    """Return the metrics of every step in a run's metrics.jsonl, in their order; lines that are not a step's are left
    out.
    """
    return [entry for line in (run / METRICS).read_bytes().splitlines() if (entry := metrics_entry(line)) is not None]


def last_metrics(run: Path) -> dict[str, Any] | None:
    """Return the metrics of the last step in a run's metrics.jsonl(only the end is read); None if there is
    none.
    """
    with regular_file(run / METRICS).open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
        lines = stream.read().split(b"\n")
    # after the last line end: a partial line, or nothing
    return next((entry for line in reversed(lines[:-1]) if (entry := metrics_entry(line)) is not None), None)
