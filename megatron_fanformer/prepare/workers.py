"""Worker processes, each encoding one input file at a time.

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
from functools import partial
from pathlib import Path
from typing import Any

from megatron_fanformer.data.manifest import Settings, TokenizerRecord
from megatron_fanformer.durable_files import write_refusal
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.prepare.document_files import DocumentFile
from megatron_fanformer.prepare.documents import chat_columns, text_columns
from megatron_fanformer.prepare.encoding import (
    BlockEncoder,
    ChatEncoder,
    EncodingThreads,
    TokenizersDisagree,
    npy_blocks,
)
from megatron_fanformer.prepare.id_encoders import EncoderChoice
from megatron_fanformer.prepare.inputs import InputFile, input_sha256
from megatron_fanformer.prepare.shards import ShardFiles, ShardRecord, ShardWriter
from megatron_fanformer.processes import end_with_owner

CONTEXT: Any = multiprocessing.get_context("spawn")  # a forked worker would inherit threads and locks in any state
PROGRESS_SECONDS = 0.2
# One file in progress and one queued, so that no worker waits while the parent is writing.
FILES_PER_WORKER = 2
# Counters of each file in progress, in memory shared with the workers.
STARTED, INPUT_BYTES, DOCUMENTS, TEXT_BYTES = range(4)


@dataclass(frozen=True, kw_only=True)
class Job:
    """The settings of a preparation that have been checked."""

    tokenizer: TokenizerRecord
    settings: Settings
    encoder: EncoderChoice
    strict: bool


@dataclass(frozen=True)
class Task:
    """One input file, and its number among them."""

    number: int
    path: InputFile


class Refused(InputError):
    """A line that is not a document, under `strict`."""


# -- in a worker process


class FileEncoder:
    """Makes the shards of input files, in a worker process."""

    def __init__(self, job: Job, folder: Path, threads: int, counters: Any) -> None:
        self._job, self._folder, self._counters = job, folder, counters
        self._is_chats = job.settings.chat is not None
        self._threads: EncodingThreads | None = None
        if job.settings.npy_dtype is None:
            kind = ChatEncoder if self._is_chats else BlockEncoder
            self._threads = EncodingThreads(lambda: kind(job.encoder, job.settings), threads)

    def encode(self, task: Task, counters: int) -> ShardRecord:
        """Make the shard of one file; its counters begin at `counters`."""
        writer = ShardWriter(ShardFiles(self._folder, task.number), task.path, is_chats=self._is_chats)
        if self._threads is None:
            return self._encode_npy(task, writer, counters)
        of_text = partial(text_columns, text_field=self._job.settings.text_field)
        file = DocumentFile(task.path, chat_columns if self._is_chats else of_text)
        for block in self._threads.encode(file.blocks()):
            writer.add(block)
            if self._job.strict and writer.first_refused is not None:
                raise Refused(f"{writer.first_refused}; fix the line, or prepare without strict to leave it out")
            self._counters[counters + INPUT_BYTES] = file.bytes_read
            self._counters[counters + DOCUMENTS] += len(block.lengths)
            self._counters[counters + TEXT_BYTES] += block.text_bytes
        return writer.finish(file.bytes_read, file.sha256)

    def _encode_npy(self, task: Task, writer: ShardWriter, counters: int) -> ShardRecord:
        tokenizer, settings = self._job.tokenizer, self._job.settings
        assert isinstance(task.path, Path) and settings.npy_dtype is not None  # prepare refuses others
        ids = {"eod_id": tokenizer.eod_id, "vocab_size": tokenizer.vocab_size}
        for block in npy_blocks(task.path, dtype=settings.npy_dtype, output_dtype=settings.dtype, **ids):
            writer.add(block)
        size = self._counters[counters + INPUT_BYTES] = task.path.stat().st_size
        return writer.finish(size, input_sha256(task.path))


_arguments: tuple[Job, Path, int, Any]
_encoder: FileEncoder | None = None


def _start(*arguments: Any) -> None:
    global _arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    end_with_owner()
    _arguments = arguments


def encode_file(task: Task, counters: int) -> ShardRecord:
    """Make the shard of one file, in a worker process. Raises FanformerError, TokenizersDisagree."""
    global _encoder
    _, folder, _, all_counters = _arguments
    all_counters[counters + STARTED] = 1
    try:
        _encoder = _encoder or FileEncoder(*_arguments)
        return _encoder.encode(task, counters)
    except (FanformerError, TokenizersDisagree):
        raise
    except OSError as error:
        # Reading errors carry the file's name; libraries that write seldom give one.
        name = error.filename or folder
        if str(name) == str(task.path):
            problem = f"{name} cannot be read ({error.strerror}); check its disk"
        else:
            problem = f"{name}: {write_refusal(error, name)}; free what ran out"
        raise FanformerError(f"{problem}, and run the same command to continue") from None
    except Exception as error:
        failure = FanformerError(f"{task.path} could not be prepared ({type(error).__name__}: {error})")
        failure.rank_traceback = traceback.format_exc()  # type: ignore[attr-defined]
        raise failure from None


# -- in the parent


Outcomes = Generator[tuple[Task, ShardRecord | Exception], None, None]
"""Each task as it ends, with its shard's record or its error."""


class Workers:
    """The worker processes of one preparation.

    Args:
        folder: the folder that shards are written into.
        report: called every `PROGRESS_SECONDS` with the input bytes, documents and text bytes encoded so far.
    """

    def __init__(self, job: Job, folder: Path, processes: int, report: Callable[[int, int, int], None]) -> None:
        self._job, self._folder, self._processes, self._report = job, folder, processes, report
        self._finished = [0, 0, 0]
        self._suspects: list[Task] = []

    def encode(self, tasks: Sequence[Task]) -> Outcomes:
        """Encode every file; yield each with its shard's record, or its error, as they are done.

        With fewer files than processes, several threads share a file.
        """
        waiting = deque(tasks)
        self._threads = -(-self._processes // max(1, min(self._processes, len(tasks))))
        while waiting:
            yield from self._run_pool(waiting, min(self._processes, len(waiting)))
            suspects, self._suspects = self._suspects, []
            for task in suspects:
                yield from self._run_pool(deque([task]), 1)
                if self._suspects:
                    self._suspects = []
                    yield (
                        task,
                        FanformerError(
                            f"two workers died while preparing {task.path} (killed, or out of memory);"
                            " start again, with fewer workers if memory is short"
                        ),
                    )

    def _run_pool(self, waiting: deque[Task], processes: int) -> Outcomes:
        """Encode the waiting files. When the pool breaks, those in progress become suspects, others wait again."""
        places = FILES_PER_WORKER * processes
        counters = CONTEXT.RawArray("q", 4 * places)
        free = list(range(places))
        under_way: dict[Future[ShardRecord], tuple[Task, int]] = {}
        others = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(processes, CONTEXT, _start, (self._job, self._folder, self._threads, counters))
        try:
            while waiting or under_way:
                while waiting and free:
                    future = pool.submit(encode_file, waiting[0], 4 * free[-1])
                    under_way[future] = (waiting.popleft(), free.pop())
                done, _ = wait(under_way, PROGRESS_SECONDS, FIRST_COMPLETED)
                self._report_sums(counters)
                for future in done:
                    error = future.exception()
                    if isinstance(error, BrokenProcessPool):
                        raise error
                    task, place = under_way.pop(future)
                    counts = counters[4 * place + INPUT_BYTES : 4 * place + 4]
                    self._finished = [sum(pair) for pair in zip(self._finished, counts, strict=True)]
                    counters[4 * place : 4 * place + 4] = [0] * 4
                    free.append(place)
                    yield task, future.result() if error is None else error  # type: ignore[misc]
        except BrokenProcessPool:
            started = [task for task, place in under_way.values() if counters[4 * place + STARTED]]
            self._suspects = started or [task for task, _ in under_way.values()]
            waiting.extend(task for task, _ in under_way.values() if task not in self._suspects)
        finally:
            for process in set(multiprocessing.active_children()) - others:
                process.kill()
            pool.shutdown(cancel_futures=True)

    def _report_sums(self, counters: Any) -> None:
        sums = (sum(counters[kind::4]) for kind in (INPUT_BYTES, DOCUMENTS, TEXT_BYTES))
        self._report(*(before + now for before, now in zip(self._finished, sums, strict=True)))
