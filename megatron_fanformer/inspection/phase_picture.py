"""The health of a run's phases over layers and steps, as a picture."""

from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.checkpoint.store import METRICS
from megatron_fanformer.errors import InputError
from megatron_fanformer.pictures import draw_heat_map, drawn
from megatron_fanformer.training.metrics import read_metrics

PANELS = {
    "health/phase_p99": "99th percentile of |phase|",
    "health/phase_max": "largest |phase|",
    "health/dead_units": "share of periodic units that are dead",
    "health/coarse_units": "share with phases that bf16 does not resolve",
    "health/periodic_weight_norm": "norm of W_p",
    "health/linear_weight_norm": "norm of W_g",
}
MOST_TICKS = 8


def phase_picture(run: Path) -> bytes:
    """Return a PNG of what `metrics.jsonl` has of phase health: a column for each look, a row for each layer.

    Raises:
        InputError: it has nothing of it.
    """
    metrics = read_metrics(run) if (run / METRICS).is_file() else []
    looks = [entry for entry in metrics if all(isinstance(entry.get(name), list) for name in PANELS)]
    if not looks:
        raise InputError(
            f"{run / METRICS} has no phase health: the run has not reached a step that logging.phase_interval divides, "
            "or its model has no phases"
        )

    def draw(panels: Any) -> None:
        for panel, (name, title) in zip(panels.flat, PANELS.items(), strict=True):
            _draw(panel, [look[name] for look in looks], [look["step"] for look in looks], title)

    return drawn(draw, rows=3, columns=2, size=(5.5, 3), title=f"{run}: phases of the FAN map")


def _draw(axes: Any, by_look: list[list[float | None]], steps: list[int], title: str) -> None:
    """Draw a heat map; shares always from 0 to 1, so that pictures of two runs can be compared."""
    limits: dict[str, Any] = {"vmin": 0.0, "vmax": 1.0} if title.startswith("share") else {}
    draw_heat_map(axes, np.array(by_look, dtype=float).T, aspect="auto", interpolation="nearest", **limits)
    shown = range(0, len(steps), -(-len(steps) // MOST_TICKS))
    axes.set_xticks(list(shown), [f"{steps[look]:,}" for look in shown])
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="step", ylabel="layer", title=title)
