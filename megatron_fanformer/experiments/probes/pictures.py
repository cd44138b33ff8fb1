"""Figures as PNG files; matplotlib is imported where one is drawn."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def drawn(
    draw: Callable[[Any], None], *, rows: int = 1, columns: int = 1, size: tuple[float, float] = (5, 3.6)
) -> bytes:
    """A PNG of panels, which are drawn by a function that is given matplotlib's array of them.

    Args:
        size: of a panel, in inches.
    """
    import matplotlib

    matplotlib.use("Agg")  # needs no display
    from matplotlib import pyplot

    shape = (columns * size[0], rows * size[1])
    figure, panels = pyplot.subplots(rows, columns, figsize=shape, dpi=100, squeeze=False, layout="constrained")
    draw(panels)
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    pyplot.close(figure)
    return picture.getvalue()


def lines_by_depth(axes: Any, depths: Sequence[int], lines: Mapping[str, Sequence[float]], *, title: str) -> None:
    """Positive figures over the number of layers, on logarithmic axes."""
    for name, values in lines.items():
        axes.plot(depths, values, marker=".", label=name, linestyle="--" if "float64" in name else "-")
    axes.set(xlabel="layers", yscale="log", title=title)
    axes.legend(fontsize="x-small")
    axes.grid(alpha=0.3)
