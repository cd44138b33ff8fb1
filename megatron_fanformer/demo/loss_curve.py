"""A run's losses as a plot."""

import math
from collections.abc import Sequence
from typing import Any

from megatron_fanformer.checkpoint.store import VALIDATION_LOSS
from megatron_fanformer.pictures import drawn

VALIDATION_PREFIX = f"{VALIDATION_LOSS}/"
SMOOTHED_SHARE = 20  # the thick line averages over the last one of so many parts of the steps, about


def loss_picture(metrics: list[dict[str, Any]], *, entropy: float | None = None) -> bytes:
    """A PNG of the training and validation losses over the steps; the training loss as it is and smoothed.

    Args:
        metrics: the objects of metrics.jsonl.
        entropy: of the tokens, in nats; drawn as the line that a model without context cannot pass.
    """

    def draw(panels: Any) -> None:
        axes = panels[0, 0]
        steps, losses = zip(*[(entry["step"], entry["loss"]) for entry in metrics if "loss" in entry], strict=True)
        axes.plot(steps, losses, linewidth=0.6, alpha=0.4, color="C0", label="training, each step")
        smooth = smoothed(losses, max(1.0, len(losses) / SMOOTHED_SHARE))
        axes.plot(steps, smooth, linewidth=2, color="C0", label="training, smoothed")
        names = sorted({name for entry in metrics for name in entry if name.startswith(VALIDATION_PREFIX)})
        for number, name in enumerate(names, start=1):
            points = [(entry["step"], entry[name]) for entry in metrics if name in entry]
            label = f"validation: {name.removeprefix(VALIDATION_PREFIX)}"
            axes.plot(*zip(*points, strict=True), "o-", color=f"C{number}", label=label)
        if entropy is not None:
            axes.axhline(entropy, linestyle="--", color="gray", label="unigram entropy of the tokens")
        axes.set(xlabel="step", ylabel="loss, nats per token", title="FANformer")
        axes.legend()

    return drawn(draw)


def smoothed(values: Sequence[float], span: float) -> list[float]:
    """Of each value and those before it the mean, with weights that fall by 1/e over `span` values.

    The weights are those of the values that there are: the first is itself, and no start is assumed.
    """
    kept = math.exp(-1 / span)
    total = weight = 0.0
    means = []
    for value in values:
        total, weight = kept * total + value, kept * weight + 1
        means.append(total / weight)
    return means
