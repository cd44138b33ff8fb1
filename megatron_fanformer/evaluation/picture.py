"""Evaluations as a picture: tasks and perplexity sets over the steps of their checkpoints."""

import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron_fanformer.evaluation.comparison import is_share
from megatron_fanformer.evaluation.results import Result

STANDARD_ERRORS = 1.96  # on either side of a value: 95% of a normal distribution


def results_picture(results: Sequence[Result]) -> bytes:
    """A PNG with a line for each task and each set, over steps where all checkpoints have one."""
    import matplotlib

    matplotlib.use("Agg")  # needs no display
    from matplotlib import pyplot

    metrics = [task.metric for result in results for task in result.tasks.values()]
    panels: list[Callable[[Sequence[Result], Any], None]] = []
    for are_shares in (True, False):
        if any(is_share(metric) == are_shares for metric in metrics):
            panels.append(partial(_draw_tasks, are_shares))
    if any(result.perplexity for result in results):
        panels.append(_draw_sets)
    figure, axes = pyplot.subplots(1, len(panels), figsize=(6.5 * len(panels), 4.8), dpi=120, squeeze=False)
    for draw, panel in zip(panels, axes[0], strict=True):
        panel.set_prop_cycle(color=pyplot.get_cmap("tab20").colors)  # more lines than the usual ten colours
        draw(results, panel)
        _name_checkpoints(results, panel)
        panel.legend(fontsize="x-small", bbox_to_anchor=(0.5, -0.14), loc="upper center", ncols=2)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", bbox_inches="tight")  # with the legends below
    pyplot.close(figure)
    return picture.getvalue()


def _places(results: Sequence[Result]) -> list[int]:
    """Of the checkpoints on the axis: their steps, or their numbers where one has no step."""
    steps = [result.step for result in results if result.step is not None]
    return steps if len(set(steps)) == len(results) else list(range(len(results)))


def _name_checkpoints(results: Sequence[Result], axes: Any) -> None:
    places = _places(results)
    if places == [result.step for result in results]:
        axes.set_xlabel("step")
    else:
        axes.set_xticks(places, [result.name for result in results], rotation=20)


def _draw_tasks(are_shares: bool, results: Sequence[Result], axes: Any) -> None:
    """Tasks whose own metric is a share of documents, or the others, with what is uncertain about each."""
    scale = 100 if are_shares else 1
    tasks = ((name, task.metric) for result in results for name, task in result.tasks.items())
    for name in dict.fromkeys(name for name, metric in tasks if is_share(metric) == are_shares):
        placed = zip(_places(results), results, strict=True)
        points = [(place, result.headline(name)) for place, result in placed if name in result.tasks]
        axes.errorbar(
            [place for place, _ in points],
            [scale * found.value for _, found in points],
            [scale * STANDARD_ERRORS * found.standard_error for _, found in points],
            label=name,
            marker=".",
            linewidth=1,
            elinewidth=0.5,
        )
    axes.set(title="tasks, with 95% intervals", ylabel="percent" if are_shares else "bits per byte, or nats")


def _draw_sets(results: Sequence[Result], axes: Any) -> None:
    for name in dict.fromkeys(name for result in results for name in result.perplexity):
        points = [
            (place, each.perplexity[name].perplexity)
            for place, each in zip(_places(results), results, strict=True)
            if name in each.perplexity
        ]
        axes.plot(*zip(*points, strict=True), label=name, marker=".", linewidth=1)
    axes.set(title="perplexity", yscale="log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
