"""The progress line of a preparation: documents, speed, time left."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_fanformer.preparation.pipeline import PrepareProgress, ProgressListener


@contextmanager
def progress_line(title: str, console: Console | None = None) -> Iterator[ProgressListener]:
    """Show a live line while the block runs; pass what is yielded to `prepare` as its `progress`.

    The line appears with the first progress: an earlier error shows none. If the output is not a terminal, one line
    is printed at the end.
    """
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
        seconds = line.tasks[0].elapsed or 0.0
        line.update(
            task,
            total=progress.input_bytes_total,
            completed=progress.input_bytes,
            documents=progress.documents,
            megabytes_per_second=progress.text_bytes / 1e6 / seconds if seconds else 0.0,
        )

    try:
        yield show
    finally:
        if line.live.is_started:
            line.stop()
