"""The metrics of a run: the table that describes them, their names on dashboards, and the picture of losses.

The groups on dashboards and the tables in docs/metrics.md follow from `METRIC_TABLE`.
"""

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_fanformer.checkpoint.run_folder import METRICS, VALIDATION_LOSS, metrics_entry

VALIDATION_PREFIX = f"{VALIDATION_LOSS}/"  # begins the metric of a validation set's loss
PERPLEXITY_LOSS_SUFFIX = "/CrossEntropyLoss"  # ends the metric of a perplexity set's loss
SMOOTHED_SHARE = 20  # the training loss is averaged over 1/20 of the steps


class Metric(NamedTuple):
    """A row of the table: one metric, or several whose names differ only in the part `NAME`."""

    name: str
    group: str
    """The metric's group on dashboards."""
    unit: str
    text: str
    """Description for docs/metrics.md. It names pages by their paths from the root of the repository."""


_TABLE = """
step | train |  | steps from 1
tokens | train |  | of all samples so far
loss | train | nats per token | mean cross entropy
z_loss | train | nats per token | with `training.z_loss_coefficient`: mean of the z-loss, which is not in `loss`
grad_norm | train |  | norm of the gradient before clipping
params_norm | train |  | every `logging.norm_interval` steps: norm of all weights
learning_rate | train |  | learning rate of the step
skipped | train |  | the reason, in place of the loss, where a step was not taken (docs/recovery.md)
data/NAME/tokens | data |  | every `logging.norm_interval` steps and after the last: tokens of a source that were
    trained on so far, without those of skipped steps; NAME is its path, below the folder of all sources
data/NAME/epochs | data |  | the same in epochs of that source
step_seconds | speed | s | time of computing and updating, without evaluation and saving
tokens_per_second | speed | tokens/s | over the same time; only tokens with a loss count (fine-tuning: learned ones)
model_flops_per_second | speed | FLOP/s | by the formula in `plan/job.py`, over all ranks; within documents
    without attention's scores (docs/fine-tuning.md#attention-within-documents)
model_flops_utilization | speed | share | that rate over the chips' rate by their data sheet, in the format of the
    products (that of FP8 in an FP8 run); left out where `plan/machines.yaml` does not know the chip
peak_memory_bytes | speed | bytes | every `logging.norm_interval` steps: the most that any rank has held since its
    start; on a GPU what torch had allocated, on a CPU the whole process
work_seconds/median | speed | s | a rank's forward and backward, every `logging.norm_interval` steps, in a run
    of several ranks (docs/clusters.md#slow-ranks)
work_seconds/slowest | speed | s | the same of the slowest rank
slowest_rank | speed |  | its number
validation_loss/NAME | evaluation | nats per token | loss on a validation set, if the step evaluated
    (docs/evaluation.md#in-the-loop)
eval/NAME/CrossEntropyLoss | evaluation | nats per token | loss on a perplexity set, by OLMo's name, if evaluated
eval/NAME/Perplexity | evaluation |  | perplexity of a set, or the mean of a group of sets
eval/NAME/BitsPerByte | evaluation | bits per byte | bits per byte of a perplexity set
eval/downstream/NAME | evaluation |  | a task's own metric, by OLMo's name
eval/downstream_bpb/NAME | evaluation | bits per byte | bits per byte of a task's right answers, by OLMo's name
evaluation_seconds | evaluation | s | time of the evaluation after this step
recovery/NAME | recovery |  | totals, once a run has recovered from something (docs/recovery.md#the-record)
health/phase_rms | health | rad | root mean square of p over units and tokens
health/phase_max | health | rad | the largest |p|
health/dead_units | health | share | units that are dead: the distance of (cos p, sin p) from its mean over the
    tokens is below 2⁻⁸ (root mean square), which is the spacing of bf16's numbers just below 1
health/coarse_units | health | share | units with a |p| of 16 or more. From there on bf16's numbers are 1/8 apart,
    so that rounding p moves it by 0.036 rad (root mean square), about what FP8 does to a phase of any size
    (docs/fp8-phase.md)
health/periodic_weight_norm | health |  | norm of W_p
health/linear_weight_norm | health |  | norm of W_g
"""
METRIC_TABLE = tuple(Metric(*line.split(" | ")) for line in _TABLE.strip().replace("\n    ", " ").splitlines())
"""Every metric that a run may log."""


@functools.cache
def find_metric(name: str) -> Metric | None:
    """Return the row of the table that describes a metric; None if this version does not know it."""
    return next((row for row in METRIC_TABLE if re.fullmatch(row.name.replace("NAME", ".+"), name)), None)


def dashboard_name(name: str) -> str:
    """Return a metric's name on dashboards, GROUP/NAME, without the prefix `eval/` of OLMo's names.

    Dashboards sort groups by name. `train` is to come first, so other groups are called `train_data`, `validation`, …
    """
    metric = find_metric(name)
    if metric is None:
        return name if "/" in name else f"train/{name}"
    group = {"train": "train", "evaluation": "validation"}.get(metric.group, f"train_{metric.group}")
    return f"{group}/{name.removeprefix('eval/').removeprefix(f'{metric.group}/')}"


def scalar_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the metrics that are numbers, and the largest number of each metric that is a list by layer."""
    largest = {name: max(value) if isinstance(value, list) and value else value for name, value in metrics.items()}
    return {name: value for name, value in largest.items() if isinstance(value, int | float)}


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step in a run's metrics.jsonl, in the order of the lines; skip unreadable lines."""
    return [entry for line in (run / METRICS).read_bytes().splitlines() if (entry := metrics_entry(line)) is not None]


def loss_picture(metrics: Sequence[dict[str, Any]], *, title: str, entropy: float) -> bytes:
    """Return a PNG of a run's training loss, raw and averaged, and of its validation losses, over the steps.

    Args:
        metrics: the objects of metrics.jsonl.
        entropy: entropy of the tokens, in nats, drawn as a line; to get below it, a model needs context.
    """
    import numpy as np

    from megatron_fanformer.pictures import render_png

    def draw(panels: Any) -> None:
        axes = panels[0, 0]
        losses = [entry["loss"] for entry in metrics]
        window = 1 + len(metrics) // SMOOTHED_SHARE  # steps
        axes.plot(range(1, len(losses) + 1), losses, linewidth=0.6, alpha=0.4, color="C0", label="training, each step")
        means = np.convolve(losses, np.full(window, 1 / window), "valid")
        axes.plot(range(window, len(losses) + 1), means, linewidth=2, color="C0", label="training, mean of steps")
        for number, name in enumerate(name for name in metrics[-1] if name.startswith(VALIDATION_PREFIX)):
            points = [(entry["step"], entry[name]) for entry in metrics if name in entry]
            label = f"validation: {name.removeprefix(VALIDATION_PREFIX)}"
            axes.plot(*zip(*points, strict=True), "o-", color=f"C{number + 1}", label=label)
        axes.axhline(entropy, linestyle="--", color="gray", label="unigram entropy of the tokens")
        axes.set(xlabel="step", ylabel="loss, nats per token", title=title)
        axes.legend()

    return render_png(draw)
