"""Draws pictures as PNG files in one style; matplotlib is imported only to draw, and needs no display.

By default, matplotlib reads the text between two `$` as mathematics, and fails if it is none, as in the name of a run's
folder. Here a `$` is a dollar.
"""

import io
from collections.abc import Callable
from typing import Any

STYLE = {
    "figure.dpi": 120,
    "axes.grid": True,
    "axes.grid.which": "both",
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.fontsize": "small",
    "text.parse_math": False,
}
PANEL = (6.5, 4.2)  # inches


def render_png(
    draw: Callable[[Any], None], *, rows: int = 1, columns: int = 1, size: tuple[float, float] = PANEL
) -> bytes:
    """Return the PNG of a figure with rows and columns of panels.

    Args:
        draw: draws into the figure's array of matplotlib's axes, [rows, columns].
        size: width and height of a panel, in inches.
    """
    import matplotlib
    from matplotlib.figure import Figure

    picture = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(columns * size[0], rows * size[1]), layout="constrained")
        draw(figure.subplots(rows, columns, squeeze=False))
        figure.savefig(picture, format="png")
    return picture.getvalue()


def set_logarithmic(*axes: Any) -> None:
    """Make axes (`panel.xaxis`, `panel.yaxis`) logarithmic, and label their ticks without mathematics, as in 1e+09."""
    from matplotlib.ticker import LogFormatter

    class PlainNumbers(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:.3g}" if super().__call__(x, pos) else ""  # matplotlib chooses which ticks get a label

    for axis in axes:
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
        axis.set_major_formatter(PlainNumbers())
        axis.set_minor_formatter(PlainNumbers())
