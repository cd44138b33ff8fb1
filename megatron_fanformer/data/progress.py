"""The progress line of a preparation: documents, speed, time left."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megatron_fanformer.data.pipeline import PrepareProgress, ProgressListener


@contextmanager
def progress_line(title: str, console: Console | None = None) -> Iterator[ProgressListener]:
    """Show a live line while the block runs; give what is yielded to `prepare` as its `progress`.

    Where the output is no terminal, one line is printed at the end.
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
    with Progress(*columns, console=console) as line:
        task = line.add_task(title, total=None, documents=0, megabytes_per_second=0.0)

        def show(progress: PrepareProgress) -> None:
            seconds = line.tasks[0].elapsed or 0.0
            line.update(
                task,
                total=progress.input_bytes_total,
                completed=progress.input_bytes,
                documents=progress.documents,
                megabytes_per_second=progress.text_bytes / 1e6 / seconds if seconds else 0.0,
            )

        yield show
