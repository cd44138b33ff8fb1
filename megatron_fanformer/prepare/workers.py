"""Worker processes, each encoding one input file at a time, and the progress that they report.

A worker that dies (killed, out of memory) breaks the pool. The files in progress are then tried once more, each
alone in a new pool; if a worker dies again, the error names the file.
"""

import multiprocessing
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fanformer.data.manifest import Settings, TokenizerRecord
from megatron_fanformer.durable_files import write_refusal
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.prepare.chats import ChatEncoder
from megatron_fanformer.prepare.documents import DocumentFile
from megatron_fanformer.prepare.encoding import (
    BlockEncoder,
    EncoderChoice,
    TokenizersDisagree,
    encode_blocks,
    npy_blocks,
)
from megatron_fanformer.prepare.inputs import InputFile, input_sha256, recorded_path
from megatron_fanformer.prepare.shards import Assignment, ShardFiles, ShardRecord, ShardWriter
from megatron_fanformer.processes import end_with_owner
from megatron_fanformer.terminal import plural

CONTEXT: Any = multiprocessing.get_context("spawn")  # a forked worker would inherit threads and locks in any state
PROGRESS_SECONDS = 0.2
SECONDS_BETWEEN_LINES = 60.0  # where there is no terminal: an hour's log has a screenful
# One file in progress and one queued, so that no worker waits while the parent is writing.
FILES_PER_WORKER = 2
# Counters of each file in progress, in memory shared with the workers.
STARTED, INPUT_BYTES, DOCUMENTS, TEXT_BYTES = range(4)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A preparation that has been checked: its files exist, its tokenizer loads."""

    files: list[InputFile]
    output: str
    tokenizer: TokenizerRecord
    settings: Settings
    encoder: EncoderChoice
    workers: int
    strict: bool

    @property
    def assignment(self) -> Assignment:
        """Return the record that the work folder is compared with."""
        return Assignment(
            inputs=[recorded_path(file) for file in self.files],
            settings=self.settings,
            tokenizer=self.tokenizer,
            encoding=self.encoder.encoding,
        )


class Refused(InputError):
    """A line that is not a document, under `strict`."""


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
def progress_line(title: str, console: Any = None) -> Iterator[ProgressListener]:
    """Show progress while the block runs: on a terminal a live line, elsewhere a line each minute and at the end.

    Pass the listener that it yields to `prepare` as its `progress`. An error before the first progress shows none.
    """
    from rich.console import Console
    from rich.text import Text

    console = console or Console()
    began = shown_at = time.monotonic()
    line = ""

    def show(progress: PrepareProgress) -> None:
        """Show the line of this moment."""
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


# -- in a worker process


class FileEncoder:
    """Makes the shards of input files, in a worker process."""

    def __init__(self, job: Job, folder: Path, threads: int, counters: Any) -> None:
        self._job, self._folder, self._counters = job, folder, counters
        self._encoders: list[Any] = []
        if job.settings.npy_dtype is None:
            kind = BlockEncoder if job.settings.chat is None else ChatEncoder
            self._encoders = [kind(job.encoder, job.settings) for _ in range(threads)]

    def encode(self, number: int, counters: int) -> ShardRecord:
        """Make the shard of the input of a number; its counters begin at `counters`."""
        job, path = self._job, self._job.files[number]
        writer = ShardWriter(ShardFiles(self._folder, number), path, is_chats=job.settings.chat is not None)
        if not self._encoders:
            assert isinstance(path, Path)  # prepare refuses others
            for block in npy_blocks(path, job.settings, job.tokenizer):
                writer.add(block)
            size = self._counters[counters + INPUT_BYTES] = path.stat().st_size
            return writer.finish(size, input_sha256(path))
        file = DocumentFile(path, self._encoders[0].parser.columns)
        for block in encode_blocks(self._encoders, file.blocks()):
            writer.add(block)
            if job.strict and writer.first_refused is not None:
                raise Refused(f"{writer.first_refused}; fix the line, or prepare without strict to leave it out")
            self._counters[counters + INPUT_BYTES] = file.bytes_read
            self._counters[counters + DOCUMENTS] += len(block.lengths)
            self._counters[counters + TEXT_BYTES] += block.text_bytes
        return writer.finish(file.bytes_read, file.sha256)


_arguments: tuple[Job, Path, int, Any]
_encoder: FileEncoder | None = None


def _start(*arguments: Any) -> None:
    global _arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    end_with_owner()
    _arguments = arguments


def encode_file(number: int, counters: int) -> ShardRecord:
    """Make the shard of one file, in a worker process.

    Raises:
        FanformerError: the file cannot be prepared.
        TokenizersDisagree: gigatoken gives other ids than the exact library.
    """
    global _encoder
    job, folder, _, all_counters = _arguments
    path = job.files[number]
    all_counters[counters + STARTED] = 1
    try:
        _encoder = _encoder or FileEncoder(*_arguments)
        return _encoder.encode(number, counters)
    except (FanformerError, TokenizersDisagree):
        raise
    except OSError as error:
        # Reading errors carry the file's name; libraries that write seldom give one.
        name = error.filename or folder
        if str(name) == str(path):
            problem = f"{name} cannot be read ({error.strerror}); check its disk"
        else:
            problem = f"{name}: {write_refusal(error, name)}; free what ran out"
        raise FanformerError(f"{problem}, and run the same command to continue") from None
    except Exception as error:
        failure = FanformerError(f"{path} could not be prepared ({type(error).__name__}: {error})")
        failure.rank_traceback = traceback.format_exc()  # type: ignore[attr-defined]
        raise failure from None


# -- in the parent


Outcomes = Generator[tuple[int, ShardRecord | Exception], None, None]
"""The number of each input once it ends, with its shard's record or its error."""


class Workers:
    """The worker processes of one preparation.

    Args:
        folder: the folder that shards are written into.
        report: called every `PROGRESS_SECONDS` with the input bytes, documents and text bytes encoded so far.
    """

    def __init__(self, job: Job, folder: Path, report: Callable[[int, int, int], None]) -> None:
        self._job, self._folder, self._report = job, folder, report
        self._finished = [0, 0, 0]
        self._suspects: list[int] = []

    def encode(self, numbers: Sequence[int]) -> Outcomes:
        """Encode the inputs of these numbers; yield each with its shard's record, or its error, as they are done.

        With fewer files than processes, several threads share a file.
        """
        waiting = deque(numbers)
        processes = self._job.workers
        self._threads = -(-processes // max(1, min(processes, len(waiting))))
        while waiting:
            yield from self._run_pool(waiting, min(processes, len(waiting)))
            suspects, self._suspects = self._suspects, []
            for number in suspects:
                yield from self._run_pool(deque([number]), 1)
                if self._suspects:
                    self._suspects = []
                    error = FanformerError(
                        f"two workers died while preparing {self._job.files[number]} (killed, or out of memory);"
                        " start again, with fewer workers if memory is short"
                    )
                    yield number, error

    def _run_pool(self, waiting: deque[int], processes: int) -> Outcomes:
        """Encode the waiting files. When the pool breaks, those in progress become suspects, others wait again."""
        places = FILES_PER_WORKER * processes
        counters = CONTEXT.RawArray("q", 4 * places)
        free = list(range(places))
        under_way: dict[Future[ShardRecord], tuple[int, int]] = {}
        others = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(processes, CONTEXT, _start, (self._job, self._folder, self._threads, counters))
        try:
            while waiting or under_way:
                while waiting and free:
                    future = pool.submit(encode_file, waiting[0], 4 * free[-1])
                    under_way[future] = (waiting.popleft(), free.pop())
                done, _ = wait(under_way, PROGRESS_SECONDS, FIRST_COMPLETED)
                sums = (sum(counters[kind::4]) for kind in (INPUT_BYTES, DOCUMENTS, TEXT_BYTES))
                self._report(*(before + now for before, now in zip(self._finished, sums, strict=True)))
                for future in done:
                    error = future.exception()
                    if isinstance(error, BrokenProcessPool):
                        raise error
                    number, place = under_way.pop(future)
                    counts = counters[4 * place + INPUT_BYTES : 4 * place + 4]
                    self._finished = [sum(pair) for pair in zip(self._finished, counts, strict=True)]
                    counters[4 * place : 4 * place + 4] = [0] * 4
                    free.append(place)
                    yield number, future.result() if error is None else error  # type: ignore[misc]
        except BrokenProcessPool:
            started = [number for number, place in under_way.values() if counters[4 * place + STARTED]]
            self._suspects = started or [number for number, _ in under_way.values()]
            waiting.extend(number for number, _ in under_way.values() if number not in self._suspects)
        finally:
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            pool.shutdown(cancel_futures=True)
