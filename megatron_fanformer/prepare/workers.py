"""Worker processes, each encoding one input file at a time, and the progress that they report.

A worker that dies (killed, out of memory) breaks the pool. The files in progress are then tried once more, each
alone in a new pool; if a worker dies again, the error names the file.
"""

import multiprocessing
import signal
import traceback
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fanformer.data.manifest import Settings, TokenizerRecord
from megatron_fanformer.durable_files import write_refusal
from megatron_fanformer.errors import FanformerError
from megatron_fanformer.prepare.chats import ChatEncoder
from megatron_fanformer.prepare.documents import DocumentFile
from megatron_fanformer.prepare.encoding import BlockEncoder, EncoderChoice, encode_blocks, npy_blocks
from megatron_fanformer.prepare.inputs import InputFile, input_sha256, recorded_path
from megatron_fanformer.prepare.shards import Assignment, ShardFiles, ShardRecord, ShardWriter
from megatron_fanformer.processes import end_with_owner

CONTEXT: Any = multiprocessing.get_context("spawn")  # a forked worker would inherit threads and locks in any state
PROGRESS_SECONDS = 0.2
# One file in progress and one queued, so that no worker waits while the parent is writing.
FILES_PER_WORKER = 2


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


# -- in a worker process


class FileEncoder:
    """Makes the shards of input files; `totals` are the input bytes, documents and text bytes of all workers."""

    def __init__(self, job: Job, folder: Path, threads: int, totals: Any) -> None:
        self._job, self._folder, self._totals = job, folder, totals
        self._encoders: list[Any] = []
        if job.settings.npy_dtype is None:
            kind = BlockEncoder if job.settings.chat is None else ChatEncoder
            self._encoders = [kind(job.encoder, job.settings) for _ in range(threads)]

    def encode(self, number: int) -> ShardRecord:
        """Make the shard of the input of a number."""
        job, path = self._job, self._job.files[number]
        writer = ShardWriter(ShardFiles(self._folder, number), path, is_chats=job.settings.chat is not None)
        if not self._encoders:
            assert isinstance(path, Path)  # prepare refuses others
            for block in npy_blocks(path, job.settings, job.tokenizer):
                writer.add(block)
            self._count(path.stat().st_size)
            return writer.finish(path.stat().st_size, input_sha256(path))
        file, counted = DocumentFile(path, self._encoders[0].parser.columns), 0
        for block in encode_blocks(self._encoders, file.blocks()):
            writer.add(block)
            self._count(file.bytes_read - counted, len(block.lengths), block.text_bytes)
            counted = file.bytes_read
        self._count(file.bytes_read - counted)
        return writer.finish(file.bytes_read, file.sha256)

    def _count(self, input_bytes: int, documents: int = 0, text_bytes: int = 0) -> None:
        with self._totals:
            for place, count in enumerate((input_bytes, documents, text_bytes)):
                self._totals[place] += count


_arguments: tuple[Job, Path, int, Any]
_encoder: FileEncoder | None = None


def _start(*arguments: Any) -> None:
    global _arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    end_with_owner()
    _arguments = arguments


def encode_file(number: int) -> ShardRecord:
    """Make the shard of one file, in a worker process. Raises FanformerError if the file cannot be prepared."""
    global _encoder
    job, folder, *_ = _arguments
    path = job.files[number]
    try:
        _encoder = _encoder or FileEncoder(*_arguments)
        return _encoder.encode(number)
    except FanformerError:
        raise
    except OSError as error:
        # Reading errors carry the file's name; libraries that write seldom give one.
        name = error.filename or folder
        what = "cannot be read" if str(name) == str(path) else "cannot be written"
        reason = f"{name} {what} ({write_refusal(error, name)}); check its disk"
        raise FanformerError(f"{reason}, and run the same command to continue") from None
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
        self._totals = CONTEXT.Array("q", 3)
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
        under_way: dict[Future[ShardRecord], int] = {}
        others = set(multiprocessing.active_children())
        arguments = (self._job, self._folder, self._threads, self._totals)
        pool = ProcessPoolExecutor(processes, CONTEXT, _start, arguments)
        try:
            while waiting or under_way:
                while waiting and len(under_way) < FILES_PER_WORKER * processes:
                    under_way[pool.submit(encode_file, waiting[0])] = waiting[0]
                    waiting.popleft()
                done, _ = wait(under_way, PROGRESS_SECONDS, FIRST_COMPLETED)
                self._report(*self._totals)
                for future in done:
                    error = future.exception()
                    if isinstance(error, BrokenProcessPool):
                        raise error
                    yield under_way.pop(future), future.result() if error is None else error  # type: ignore[misc]
        except BrokenProcessPool:
            self._suspects = list(under_way.values())
        finally:
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            pool.shutdown(cancel_futures=True)
