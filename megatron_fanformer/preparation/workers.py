"""Worker processes, each encoding one input file at a time, and their supervision.

A worker that dies is noticed at once, by its closed connection. Its file is tried once more, by a new worker; if
that one dies too, the error names the file.
"""

import multiprocessing
import signal
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatron_fanformer.data.manifest import Settings
from megatron_fanformer.durable_files import write_refusal
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.preparation.chats import chat_columns
from megatron_fanformer.preparation.document_files import DocumentFile
from megatron_fanformer.preparation.documents import text_columns
from megatron_fanformer.preparation.encoding import BlockEncoder, ChatEncoder, EncodingThreads, TokenizersDisagree
from megatron_fanformer.preparation.id_encoders import EncoderChoice
from megatron_fanformer.preparation.npy_documents import npy_blocks
from megatron_fanformer.preparation.remote_inputs import InputFile, input_sha256
from megatron_fanformer.preparation.shards import ShardFiles, ShardRecord, ShardWriter
from megatron_fanformer.processes import end_with_owner

CONTEXT: Any = multiprocessing.get_context("spawn")  # a forked worker would inherit threads and locks in any state
PROGRESS_SECONDS = 0.2
# One file in progress and one queued, so that no worker waits while the parent is writing.
FILES_PER_WORKER = 2
ATTEMPTS = 2


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """The settings that every worker is given."""

    encoder: EncoderChoice
    settings: Settings
    vocab_size: int
    folder: Path
    """Folder that shards are written into."""
    strict: bool


@dataclass(frozen=True)
class Task:
    """One input file, and its number among them."""

    number: int
    path: InputFile


@dataclass(frozen=True)
class WorkDone:
    """The work that a worker has done since its last report."""

    input_bytes: int
    documents: int
    text_bytes: int


@dataclass(frozen=True)
class Done:
    """A shard is complete."""

    task: Task
    record: ShardRecord


@dataclass(frozen=True)
class Failed:
    """A file could not be encoded: it is at fault, or its worker died."""

    task: Task
    error: Exception


# -- in a worker process


def run_worker(setup: WorkerSetup, threads: int, connection: Connection) -> None:
    """Encode the files that arrive over the connection, until None does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the parent
    end_with_owner()
    encoder = _FileEncoder(setup, threads, connection)
    while (task := connection.recv()) is not None:
        try:
            connection.send(Done(task, encoder.encode(task)))
        except (FanformerError, TokenizersDisagree) as error:
            connection.send(Failed(task, error))
        except OSError as error:
            connection.send(Failed(task, _refused_by_system(error, task, setup.folder)))
        except Exception as error:
            failure = FanformerError(f"{task.path} could not be prepared ({type(error).__name__}: {error})")
            failure.rank_traceback = traceback.format_exc()  # type: ignore[attr-defined]
            connection.send(Failed(task, failure))


def _refused_by_system(error: OSError, task: Task, folder: Path) -> FanformerError:
    # What is read has its name in the error; what is written, by libraries, seldom.
    name = error.filename or folder
    if str(name) == str(task.path):
        what, remedy = f"{name} cannot be read ({error.strerror})", "check its disk"
    else:
        what, remedy = f"{name}: {write_refusal(error, name)}", "free what ran out"
    return FanformerError(f"{what}; {remedy}, and run the same command to continue")


class _FileEncoder:
    def __init__(self, setup: WorkerSetup, threads: int, connection: Connection) -> None:
        self._setup = setup
        self._connection = connection
        self._reported = time.monotonic()
        self._is_chats = setup.settings.chat is not None
        self._threads: EncodingThreads | None = None
        if setup.settings.npy_dtype is None:
            kind = ChatEncoder if self._is_chats else BlockEncoder
            self._threads = EncodingThreads(lambda: kind(setup.encoder, setup.settings), threads)

    def encode(self, task: Task) -> ShardRecord:
        """Make the shard of one file."""
        files = ShardFiles(self._setup.folder, task.number)
        writer = ShardWriter(files, task.path, is_chats=self._is_chats)
        if self._threads is None:
            return self._encode_npy(task, writer)
        return self._encode_documents(task, writer, self._threads)

    def _encode_documents(self, task: Task, writer: ShardWriter, threads: EncodingThreads) -> ShardRecord:
        of_text = partial(text_columns, text_field=self._setup.settings.text_field)
        file = DocumentFile(task.path, chat_columns if self._is_chats else of_text)
        unsent = Counter[str]()
        for block in threads.encode(file.blocks()):
            writer.add(block)
            if self._setup.strict and writer.first_refused is not None:
                raise Refused(f"{writer.first_refused}; fix the line, or prepare without strict to leave it out")
            unsent.update(documents=len(block.lengths), text_bytes=block.text_bytes)
            self._report(unsent, file.bytes_read)
        self._report(unsent, file.bytes_read, now=True)
        return writer.finish(file.bytes_read, file.sha256)

    def _encode_npy(self, task: Task, writer: ShardWriter) -> ShardRecord:
        setup, settings = self._setup, self._setup.settings
        assert settings.npy_dtype is not None
        size = task.path.stat().st_size
        ids = {"eod_id": setup.encoder.eod_id, "vocab_size": setup.vocab_size}
        assert isinstance(task.path, Path), "prepare refuses others"
        for block in npy_blocks(task.path, dtype=settings.npy_dtype, output_dtype=settings.dtype, **ids):
            writer.add(block)
        self._connection.send(WorkDone(size, 0, 0))
        return writer.finish(size, input_sha256(task.path))

    def _report(self, unsent: "Counter[str]", bytes_read: int, *, now: bool = False) -> None:
        """Report what has been done, now and then; `unsent` keeps the counts not sent yet, and the bytes that are."""
        if now or time.monotonic() - self._reported > PROGRESS_SECONDS:
            before = unsent["bytes"]
            self._connection.send(WorkDone(bytes_read - before, unsent["documents"], unsent["text_bytes"]))
            unsent.clear()
            unsent["bytes"] = bytes_read
            self._reported = time.monotonic()


class Refused(InputError):
    """A line that is not a document, under `strict`."""


# -- in the parent


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    connection: Connection
    threads: int
    tasks: deque[Task] = field(default_factory=deque)


class WorkerPool:
    """The worker processes of one run; a context manager."""

    def __init__(self, setup: WorkerSetup, workers: int) -> None:
        self._setup = setup
        self._total = workers
        self._workers: list[_Worker] = []
        self._deaths: Counter[Task] = Counter()

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.connection.close()
        for worker in self._workers:
            worker.process.join()

    def work(self, tasks: Sequence[Task]) -> Iterator[WorkDone | Done | Failed]:
        """Run every task; yields the workers' messages as they arrive.

        With fewer files than workers, several threads share a file.
        """
        waiting = deque(tasks)
        count = min(self._total, len(tasks))
        for number in range(count):
            self._start(self._total // count + (number < self._total % count))
        while waiting or any(worker.tasks for worker in self._workers):
            for worker in list(self._workers):
                self._hand_out(worker, waiting)
            yield from self._listen(waiting)

    def _start(self, threads: int) -> None:
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=run_worker, args=(self._setup, threads, theirs), daemon=True)
        process.start()
        theirs.close()
        self._workers.append(_Worker(process, ours, threads))

    def _hand_out(self, worker: _Worker, waiting: deque[Task]) -> None:
        while (
            waiting
            and len(worker.tasks) < FILES_PER_WORKER
            and (not worker.tasks or len(waiting) >= len(self._workers))
        ):
            worker.tasks.append(waiting.popleft())
            try:
                worker.connection.send(worker.tasks[-1])
            except OSError:
                return  # it has died; its closed connection is noticed next

    def _listen(self, waiting: deque[Task]) -> Iterator[WorkDone | Done | Failed]:
        ready = wait([worker.connection for worker in self._workers])
        for worker in [worker for worker in self._workers if worker.connection in ready]:
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                yield from self._reap(worker, waiting)
                continue
            if not isinstance(message, WorkDone):
                worker.tasks.popleft()
            yield message

    def _reap(self, worker: _Worker, waiting: deque[Task]) -> Iterator[Failed]:
        """Replace a dead worker: its files go to another, unless it is the second to die on the first of them."""
        self._workers.remove(worker)
        worker.process.join()
        tasks, worker.tasks = worker.tasks, deque()
        self._start(worker.threads)
        if tasks:
            task = tasks.popleft()
            self._deaths[task] += 1
            if self._deaths[task] < ATTEMPTS:
                tasks.appendleft(task)
            else:
                yield Failed(task, _died(task, worker.process.exitcode))
        waiting.extendleft(reversed(tasks))


def _died(task: Task, exit_code: Any) -> FanformerError:
    how = f"by signal {-exit_code}" if exit_code is not None and exit_code < 0 else f"with exit code {exit_code}"
    return FanformerError(
        f"two workers died {how} while preparing {task.path} (killed, or out of memory);"
        " start again, with fewer workers if memory is short"
    )
