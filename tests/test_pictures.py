"""Pictures: names are drawn as they are, on logarithmic axes too."""

from typing import Any

import pytest
from matplotlib.figure import Figure

from megatron_fanformer.pictures import render_png, set_logarithmic

NAME = "lr$1e-3^$"  # matplotlib fails on it, read as mathematics


def test_a_dollar_is_a_dollar_wherever_a_name_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *to, **how: (figures.append(figure), save(figure, *to, **how))
    )

    def draw(panels: Any) -> None:
        for axes, top in zip(panels[0], (30.0, 1e9), strict=True):
            axes.bar([0, 1], [2.0, top], label=NAME)
            axes.set(title=NAME, ylabel=NAME)
            axes.set_xticks([0, 1], [NAME, "$"])
            set_logarithmic(axes.yaxis)
            axes.legend()

    assert render_png(draw, columns=2).startswith(b"\x89PNG")
    ticks = [
        [label.get_text() for which in ("major", "minor") for label in axes.yaxis.get_ticklabels(which=which)]
        for axes in figures[0].axes
    ]
    assert "10" in ticks[0] and any("e+" in label for label in ticks[1])
    assert not any("$" in label for labels in ticks for label in labels)
