"""The queue's report: a line for each figure, its goal, and whether that is met."""

from collections.abc import Iterator, Sequence

from megatron_fanformer import markdown
from queueing.running import DONE, Result

COLUMNS = ("part", "decided what", "figure", "goal", "met", "seconds")


def page(results: Sequence[Result], *, heading: str) -> str:
    """The whole page, in Markdown."""
    lines = ["# What the queue found", "", heading, ""]
    lines += [markdown.table(COLUMNS, [row for result in results for row in _rows(result)], align="lllllr")]
    dates = [f"{result.part} {result.ended} at {result.commit}" for result in results if result.ended]
    return "\n".join([*lines, "", f"Ended: {', '.join(dates) or 'none'}.", ""])


def _rows(result: Result) -> Iterator[tuple[str, ...]]:
    """A part's rows: how it ended where that is not as it should, and its figures."""
    beginning = (result.part, markdown.as_text(result.decides))
    seconds = f"{result.seconds:.0f}" if result.ended else ""
    if result.status != DONE or not result.figures:
        yield (*beginning, markdown.as_text(result.status), "", "", seconds)
        beginning, seconds = (result.part, ""), ""
    for figure in result.figures:
        yield (*beginning, markdown.as_text(f"{figure.name}: {figure.shown}"), figure.rule, figure.verdict, seconds)
        beginning, seconds = (result.part, ""), ""
