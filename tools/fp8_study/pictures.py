"""A report's two figures."""

from typing import Any

import numpy as np

from fp8_study.comparison import Report, trainings
from fp8_study.tables import bin_labels
from fp8_study.trainings import ARMS, BASES, FAN_BF16
from megatron_fanformer.pictures import drawn, set_logarithmic

SMOOTHED_STEPS = 25  # single steps differ by their samples more than by the number format
COLORS = {arm: f"C{number}" for number, arm in enumerate(ARMS)}


def losses_picture(report: Report) -> bytes:
    """Training losses over the steps, and what FP8, or other roundings in bf16, add to those in bf16; a PNG."""

    def draw(panels: Any) -> None:
        left, right = panels[0]
        for arm in ARMS:
            steps, losses = _smoothed(report, arm)
            left.plot(steps, losses.mean(0), linewidth=1, color=COLORS[arm], label=arm.name)
        for arm, base in BASES.items():
            steps, losses = _smoothed(report, arm)
            apart = losses - _smoothed(report, base)[1]
            right.plot(steps, apart.T, linewidth=0.5, alpha=0.4, color=COLORS[arm])
            right.plot(steps, apart.mean(0), linewidth=1.5, color=COLORS[arm], label=arm.name)
        right.axhline(0, color="gray", linewidth=0.8)
        title = f"mean of {len(losses)} seeds and of {SMOOTHED_STEPS} steps"
        left.set(xlabel="step", ylabel="training loss, nats per token", title=title)
        right.set(
            xlabel="step", ylabel="loss minus the same model's in bf16", title="thin: each seed; bold: their mean"
        )
        left.legend()
        right.legend()

    return drawn(draw, columns=2)


def errors_picture(report: Report) -> bytes:
    """Errors of p and of cos p by the size of p, after training in bf16, beside the two formulas; a PNG."""
    (found,) = list(trainings(report, FAN_BF16)[0]["phases"].values())[-1:]
    rows = [pair for pair in zip(found["bf16_errors"], found["fp8_errors"], strict=True) if pair[0]["count"]]
    at = np.arange(len(rows))
    labels = [f"{label}\n{fp8['share']:.2%}" for label, (_, fp8) in zip(bin_labels(), rows, strict=False)]

    def draw(panels: Any) -> None:
        left, right = panels[0]
        left.plot(at, [fp8["half_ulp_phase"] for _, fp8 in rows], "k:", label="formula: |p| · 2⁻⁴")
        for axes, name in ((left, "phase"), (right, "cos")):
            axes.plot(at, [bf16[name] for bf16, _ in rows], "o-", label="map in bf16")
            axes.plot(at, [fp8[name] for _, fp8 in rows], "o-", label="map in FP8")
            axes.plot(at, [fp8[f"expected_{name}"] for _, fp8 in rows], "k--", label="formula: independent errors")
            set_logarithmic(axes.yaxis)
            axes.set(xlabel="|p|, and share of all phases", xticks=at, xticklabels=labels)
            axes.legend()
        left.set(ylabel="rms error of p, radians", title="phase")
        right.set(ylabel="rms error of cos p", title="cos p")

    return drawn(draw, columns=2)


def _smoothed(report: Report, arm: Any) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and the losses [seeds, steps] as running means."""
    losses = np.array([training["losses"] for training in trainings(report, arm)])
    width = min(SMOOTHED_STEPS, losses.shape[1])
    means = np.stack([np.convolve(line, np.full(width, 1 / width), mode="valid") for line in losses])
    return np.arange(width, losses.shape[1] + 1), means
