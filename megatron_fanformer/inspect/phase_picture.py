"""The health of a run's phases over layers and steps, as a picture."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_fanformer.pictures import draw_heat_map, drawn

PANELS = {
    "health/phase_p99": "99th percentile of |phase|",
    "health/phase_max": "largest |phase|",
    "health/dead_units": "share of periodic units that are dead",
    "health/coarse_units": "share with phases that bf16 does not resolve",
    "health/periodic_weight_norm": "norm of W_p",
    "health/linear_weight_norm": "norm of W_g",
}
MOST_TICKS = 8


def phase_picture(metrics: Sequence[dict[str, Any]], *, title: str) -> bytes | None:
    """Return a PNG of phase health: a column for each step that has it, a row for each layer; None if no step has it.

    Shares always go from 0 to 1, so that pictures of two runs can be compared.
    """
    looks = [entry for entry in metrics if all(isinstance(entry.get(name), list) for name in PANELS)]
    if not looks:
        return None

    def draw(panels: Any) -> None:
        ticks = range(0, len(looks), -(-len(looks) // MOST_TICKS))
        for axes, (name, title) in zip(panels.flat, PANELS.items(), strict=True):
            limits: dict[str, Any] = {"vmin": 0.0, "vmax": 1.0} if title.startswith("share") else {}
            values = np.array([look[name] for look in looks], dtype=float).T
            draw_heat_map(axes, values, aspect="auto", interpolation="nearest", **limits)
            axes.set_xticks(list(ticks), [f"{looks[tick]['step']:,}" for tick in ticks])
            axes.yaxis.get_major_locator().set_params(integer=True)
            axes.set(xlabel="step", ylabel="layer", title=title)

    return drawn(draw, rows=3, columns=2, size=(5.5, 3), title=title)
