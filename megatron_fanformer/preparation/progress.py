"""Progress of a preparation: documents, speed, time left."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_fanformer.preparation.pipeline import PrepareProgress, ProgressListener
from megatron_fanformer.terminal import plural

SECONDS_BETWEEN_LINES = 60.0  # where there is no terminal: an hour's log has a screenful


def progress_line(title: str, console: Console | None = None) -> AbstractContextManager[ProgressListener]:
    """Show a live line while the block runs; pass what is yielded to `prepare` as its `progress`.

    The line appears with the first progress: an earlier error shows none. If the output is not a terminal, a line is
    printed each minute and at the end.
    """
    console = console or Console()
    return (_live_line if console.is_terminal else _lines)(title, console)


@contextmanager
def _live_line(title: str, console: Console) -> Iterator[ProgressListener]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[documents]:,} documents"),
        TextColumn("{task.fields[megabytes_per_second]:.1f} MB/s"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    line = Progress(*columns, console=console)
    task = line.add_task(title, total=None, documents=0, megabytes_per_second=0.0)

    def show(progress: PrepareProgress) -> None:
        line.start()
        line.update(
            task,
            total=progress.input_bytes_total,
            completed=progress.input_bytes,
            documents=progress.documents,
            megabytes_per_second=_rate(progress, line.tasks[0].elapsed or 0.0),
        )

    try:
        yield show
    finally:
        if line.live.is_started:
            line.stop()


@contextmanager
def _lines(title: str, console: Console) -> Iterator[ProgressListener]:
    last: PrepareProgress | None = None
    began = shown_at = time.monotonic()

    def print_line(progress: PrepareProgress) -> None:
        seconds = time.monotonic() - began
        share = progress.input_bytes / max(1, progress.input_bytes_total)
        speed = f"{_rate(progress, seconds):.1f} MB/s, {seconds:.0f} s"
        line = f"{title}: {plural(progress.documents, 'document')}, {share:.0%} of the input, {speed}"
        console.print(line, highlight=False, soft_wrap=True)

    def show(progress: PrepareProgress) -> None:
        nonlocal last, shown_at
        last = progress
        if time.monotonic() - shown_at >= SECONDS_BETWEEN_LINES:
            shown_at = time.monotonic()
            print_line(progress)

    try:
        yield show
    finally:
        if last is not None:
            print_line(last)


def _rate(progress: PrepareProgress, seconds: float) -> float:
    """Megabytes of text a second."""
    return progress.text_bytes / 1e6 / seconds if seconds else 0.0
