"""Pictures as PNG files, all in one style; matplotlib is imported where one is drawn, and needs no display.

A `$` in a picture is a dollar. Left alone, matplotlib reads the text between two of them as mathematics, and fails
where it is none: in the name of a run's folder, say, or of a task.
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


def drawn(draw: Callable[[Any], None], *, rows: int = 1, columns: int = 1, size: tuple[float, float] = PANEL) -> bytes:
    """Return a PNG of panels, which are drawn by a function that is given matplotlib's array of them, [rows, columns].

    Args:
        size: of a panel, in inches.
    """
    import matplotlib
    from matplotlib.figure import Figure

    picture = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(columns * size[0], rows * size[1]), layout="constrained")
        draw(figure.subplots(rows, columns, squeeze=False))
        figure.savefig(picture, format="png")
    return picture.getvalue()


def set_logarithmic(*several: Any) -> None:
    """Make axes (`panel.xaxis`, `panel.yaxis`) logarithmic, their ticks plain numbers: matplotlib's are mathematics."""
    from matplotlib.ticker import LogFormatter

    class PlainNumbers(LogFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:.3g}" if super().__call__(x, pos) else ""  # which ticks get a label is the formatter's choice

    for axis in several:
        getattr(axis.axes, f"set_{axis.axis_name}scale")("log")
        axis.set_major_formatter(PlainNumbers())
        axis.set_minor_formatter(PlainNumbers())
