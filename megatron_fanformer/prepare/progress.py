"""Progress of a preparation: documents, speed, time left."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from megatron_fanformer.terminal import plural

SECONDS_BETWEEN_LINES = 60.0  # where there is no terminal: an hour's log has a screenful


@dataclass(frozen=True, kw_only=True)
class PrepareProgress:
    """The progress of a preparation."""

    documents: int
    text_bytes: int
    """UTF-8 bytes of the documents' text that this run has encoded."""
    input_bytes: int
    """Bytes of the input files that have been processed, as they are on disk (compressed)."""
    input_bytes_total: int


ProgressListener = Callable[[PrepareProgress], None]


@contextmanager
def progress_line(title: str, console: Console | None = None) -> Iterator[ProgressListener]:
    """Show progress while the block runs: on a terminal a live line, elsewhere a line each minute and at the end.

    Pass what is yielded to `prepare` as its `progress`. An error before the first progress shows none.
    """
    console = console or Console()
    began = shown_at = time.monotonic()
    line = ""

    def show(progress: PrepareProgress) -> None:
        nonlocal line, shown_at
        now = time.monotonic()
        seconds = now - began
        share = progress.input_bytes / max(1, progress.input_bytes_total)
        speed = progress.text_bytes / 1e6 / seconds if seconds else 0.0
        line = f"{title}: {plural(progress.documents, 'document')}, {share:.0%} of the input, {speed:.1f} MB/s"
        line += f", {seconds:.0f} s"
        if live is not None:
            live.start()
            live.update(Text(f"{line}, {seconds / share - seconds:.0f} s left" if share else line))
        elif now - shown_at >= SECONDS_BETWEEN_LINES:
            shown_at = now
            console.print(line, highlight=False, soft_wrap=True)

    live = console.status("") if console.is_terminal else None
    try:
        yield show
    finally:
        if live is not None:
            live.stop()
        elif line:
            console.print(line, highlight=False, soft_wrap=True)
