"""The losses of a run over its steps, as a picture: in training, as they are and smoothed, and in validation."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_fanformer.pictures import drawn
from megatron_fanformer.train.metrics import VALIDATION_PREFIX

SMOOTHED_SHARE = 20  # smoothed over the window of one of so many parts of the steps


def loss_picture(metrics: Sequence[dict[str, Any]], *, title: str, entropy: float | None = None) -> bytes:
    """Return a PNG of the training and validation losses over the steps; the training loss as it is and smoothed.

    Args:
        metrics: the objects of metrics.jsonl.
        entropy: of the tokens, in nats; drawn as the line that a model without context cannot pass.
    """

    def draw(panels: Any) -> None:
        axes = panels[0, 0]
        if points := points_of(metrics, "loss"):
            steps, losses = zip(*points, strict=True)
            axes.plot(steps, losses, linewidth=0.6, alpha=0.4, color="C0", label="training, each step")
            smooth = smoothed(losses, smoothing_window(len(losses)))
            axes.plot(steps, smooth, linewidth=2, color="C0", label="training, smoothed")
        names = sorted({name for entry in metrics for name in entry if name.startswith(VALIDATION_PREFIX)})
        for number, name in enumerate(names, start=1):
            if points := points_of(metrics, name):
                label = f"validation: {name.removeprefix(VALIDATION_PREFIX)}"
                axes.plot(*zip(*points, strict=True), "o-", color=f"C{number}", label=label)
        if entropy is not None:
            axes.axhline(entropy, linestyle="--", color="gray", label="unigram entropy of the tokens")
        axes.set(xlabel="step", ylabel="loss, nats per token", title=title)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()

    return drawn(draw)


def points_of(metrics: Sequence[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Return steps and values, but those that are no finite number: in running sums, one would spoil all after it."""
    return [
        (entry["step"], entry[name])
        for entry in metrics
        if type(entry.get(name)) in (int, float) and math.isfinite(entry[name])
    ]


def smoothing_window(steps: int) -> int:
    """Return the number of steps, an odd one, that a loss of so many is smoothed over."""
    return 2 * (steps // (2 * SMOOTHED_SHARE)) + 1


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Return each value as the line through those around it has it.

    Away from the ends, with as many before as after, that is their mean. The first and last values are on the lines
    through the first and last windows, which follow a loss that falls: a mean of the values so far lags behind all.

    Args:
        window: an odd number of values, at most all.
    """
    y, place = np.asarray(values, dtype=float), np.arange(len(values))
    first = np.clip(place - window // 2, 0, len(y) - window)
    end, middle = first + window, first + window // 2

    def sums(of: np.ndarray) -> np.ndarray:
        so_far = np.concatenate([[0.0], np.cumsum(of)])
        return np.asarray(so_far[end] - so_far[first])

    total = sums(y)
    spread = max(1.0, window * (window**2 - 1) / 12)  # the sum of the squares of -h, …, h
    slope = (sums(y * place) - middle * total) / spread
    fitted: list[float] = (total / window + slope * (place - middle)).tolist()
    return fitted
