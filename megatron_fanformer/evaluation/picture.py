"""Evaluations as a picture: tasks and perplexity sets over the steps of their checkpoints."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megatron_fanformer.evaluation.comparison import is_share
from megatron_fanformer.evaluation.results import Result, names_of
from megatron_fanformer.pictures import drawn, set_logarithmic, use_many_colours

STANDARD_ERRORS = 1.96  # on either side of a value: 95% of a normal distribution


def results_picture(results: Sequence[Result]) -> bytes:
    """A PNG with a line for each task and each set, of each run over its steps where all checkpoints have one."""
    metrics = [task.metric for result in results for task in result.tasks.values()]
    parts: list[Callable[[Sequence[Result], Any], None]] = []
    for are_shares in (True, False):
        if any(is_share(metric) == are_shares for metric in metrics):
            parts.append(partial(_draw_tasks, are_shares))
    if any(result.perplexity for result in results):
        parts.append(_draw_sets)

    def draw(panels: Any) -> None:
        for draw_part, panel in zip(parts, panels[0], strict=True):
            use_many_colours(panel)
            draw_part(results, panel)
            _name_checkpoints(results, panel)
            panel.legend(fontsize="x-small", bbox_to_anchor=(0.5, -0.14), loc="upper center", ncols=2)

    return drawn(draw, columns=len(parts), grows=True)


def lines_of(results: Sequence[Result]) -> dict[str, list[tuple[int, Result]]]:
    """By what tells them apart in the legend, the checkpoints of each run and their steps, in order of these.

    Where one has no step, all are one line, at their numbers.
    """
    placed = [(result.step, result) for result in results if result.step is not None]
    if len(placed) < len(results):
        return {"": list(enumerate(results))}
    runs = dict.fromkeys(str(result.run) for result in results)
    if len(runs) == 1:
        return {"": sorted(placed, key=lambda one: one[0])}
    first = [next(result for result in results if result.run == run) for run in runs]
    labels = [name.rpartition("/")[0] for name in names_of(first)]
    return {
        label: sorted(((step, result) for step, result in placed if result.run == run), key=lambda one: one[0])
        for label, run in zip(labels, runs, strict=True)
    }


def _name_checkpoints(results: Sequence[Result], axes: Any) -> None:
    if all(result.step is not None for result in results):
        axes.set_xlabel("step")
    else:
        axes.set_xticks(range(len(results)), names_of(results), rotation=20)


def _label(name: str, line: str) -> str:
    return f"{name} ({line})" if line else name


def _draw_tasks(are_shares: bool, results: Sequence[Result], axes: Any) -> None:
    """Tasks whose own metric is a share of documents, or the others, with what is uncertain about each."""
    scale = 100 if are_shares else 1
    tasks = ((name, task.metric) for result in results for name, task in result.tasks.items())
    for name in dict.fromkeys(name for name, metric in tasks if is_share(metric) == are_shares):
        for line, placed in lines_of(results).items():
            points = [(place, result.headline(name)) for place, result in placed if name in result.tasks]
            axes.errorbar(
                [place for place, _ in points],
                [scale * found.value for _, found in points],
                [scale * STANDARD_ERRORS * found.standard_error for _, found in points],
                label=_label(name, line),
                marker=".",
                linewidth=1,
                elinewidth=0.5,
            )
    axes.set(title="tasks, with 95% intervals", ylabel="percent" if are_shares else "bits per byte, or nats")


def _draw_sets(results: Sequence[Result], axes: Any) -> None:
    for name in dict.fromkeys(name for result in results for name in result.perplexity):
        for line, placed in lines_of(results).items():
            points = [(place, each.perplexity[name].perplexity) for place, each in placed if name in each.perplexity]
            places, perplexities = [place for place, _ in points], [perplexity for _, perplexity in points]
            axes.plot(places, perplexities, label=_label(name, line), marker=".", linewidth=1)
    axes.set(title="perplexity")
    set_logarithmic(axes.yaxis)
