"""The work of a preparation: worker processes encode input files, and the results are assembled in the files' order.

If a worker dies (killed, out of memory), the pool of processes breaks. The files in progress are then tried once more,
each alone in a new pool; if a worker dies again, the error names the file.

Several machines may share a preparation: each encodes one shard of the input files, and `merge` assembles all shards.
"""

import ctypes
import math
import multiprocessing
import platform
import signal
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_fanformer import __version__
from megatron_fanformer.data.manifest import Manifest, Settings, TokenizerRecord, encode_manifest, manifest_path
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import CorruptError, FanformerError, InputError
from megatron_fanformer.prepare.chats import ChatEncoder
from megatron_fanformer.prepare.documents import DocumentFile
from megatron_fanformer.prepare.encoded_inputs import (
    REFUSED_EXAMPLES,
    Assignment,
    EncodedInput,
    EncodedRecord,
    EncodedWriter,
    WorkFolder,
    read_finished,
    work_folder,
)
from megatron_fanformer.prepare.encoding import BlockEncoder, EncoderChoice, encode_blocks, npy_blocks
from megatron_fanformer.prepare.inputs import InputFile, input_sha256, recorded_path
from megatron_fanformer.prepare.outputs import Assembler, refuse_existing_files, writing_to
from megatron_fanformer.prepare.verb import Shard
from megatron_fanformer.processes import end_with_owner
from megatron_fanformer.terminal import plural

TOOLS = ("gigatoken", "tokenizers", "sentencepiece", "numpy", "pyarrow")
FAILURES_NAMED = 5
CONTEXT: Any = multiprocessing.get_context("spawn")  # a forked worker would inherit threads and locks in any state
PROGRESS_SECONDS = 0.2
# One file in progress and one queued, so that no worker waits while the parent is writing.
FILES_PER_WORKER = 2

ProgressListener = Callable[[int, float], None]
"""Called with the number of documents encoded so far, and the share of the input's bytes that were read for them."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A preparation whose options were checked: the input files exist, the tokenizer loads."""

    files: list[InputFile]
    output: str
    tokenizer: TokenizerRecord
    settings: Settings
    encoder: EncoderChoice
    workers: int
    strict: bool

    @property
    def assignment(self) -> Assignment:
        """Return the inputs and settings, to be compared with those recorded in a work folder."""
        return Assignment(
            inputs=[recorded_path(file) for file in self.files],
            settings=self.settings,
            tokenizer=self.tokenizer,
            encoding=self.encoder.encoding,
        )


# -- in a worker process


class FileEncoder:
    """Encodes input files in a worker process.

    Args:
        totals: the numbers of input bytes and of documents encoded so far, shared by all workers.
    """

    def __init__(self, job: Job, folder: Path, threads: int, totals: Any) -> None:
        self.job, self.folder = job, folder
        self._threads, self._totals = threads, totals

    @cached_property
    def _encoders(self) -> list[Any]:
        encoder_type = BlockEncoder if self.job.settings.chat is None else ChatEncoder
        return [encoder_type(self.job.encoder, self.job.settings) for _ in range(self._threads)]

    def encode(self, number: int) -> EncodedRecord:
        """Encode the input file of this number in the job."""
        job, path = self.job, self.job.files[number]
        writer = EncodedWriter(EncodedInput(self.folder, number), path, is_chats=job.settings.chat is not None)
        if job.settings.npy_dtype is not None:
            assert isinstance(path, Path)  # `input_files` refuses token files on another store
            for block in npy_blocks(path, job.settings, job.tokenizer):
                writer.add(block)
            self._add_to_totals(path.stat().st_size)
            return writer.finish(path.stat().st_size, input_sha256(path))
        file, counted_bytes = DocumentFile(path, self._encoders[0].parser.columns), 0
        for block in encode_blocks(self._encoders, file.blocks()):
            writer.add(block)
            self._add_to_totals(file.bytes_read - counted_bytes, len(block.lengths))
            counted_bytes = file.bytes_read
        self._add_to_totals(file.bytes_read - counted_bytes)
        return writer.finish(file.bytes_read, file.sha256)

    def _add_to_totals(self, input_bytes: int, documents: int = 0) -> None:
        with self._totals:  # holds the lock of this array, which all workers share
            self._totals[0] += input_bytes
            self._totals[1] += documents


_encoder: FileEncoder


def _start_worker(*encoder_arguments: Any) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    end_with_owner()
    # By glibc's mallopt, memory that one block freed stays with the process for the next, which saves 5% of CPU.
    ctypes.CDLL(None).mallopt(-1, 64 << 20)  # M_TRIM_THRESHOLD
    ctypes.CDLL(None).mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD
    _encoder = FileEncoder(*encoder_arguments)


def encode_file(number: int) -> EncodedRecord:
    """Encode one input file, in a worker process. Raises FanformerError if the file cannot be prepared."""
    path = _encoder.job.files[number]
    try:
        return _encoder.encode(number)
    except FanformerError:
        raise
    except OSError as error:
        # An error of reading names the file; libraries that write seldom name theirs.
        name = error.filename or _encoder.folder
        verb = "read" if str(name) == str(path) else "written"
        raise FanformerError(
            f"{name} cannot be {verb} ({error.strerror or error}); check its disk, and run the same command to continue"
        ) from None
    except Exception as error:
        failure = FanformerError(f"{path} could not be prepared ({type(error).__name__}: {error})")
        failure.rank_traceback = traceback.format_exc()  # type: ignore[attr-defined]
        raise failure from None


# -- in the parent


Outcome = tuple[int, EncodedRecord | Exception]
"""The number of an input file, and the record of its encoding or the error that ended it."""


def _run_workers(
    job: Job, folder: Path, numbers: Sequence[int], report: Callable[[int, int], None]
) -> Generator[Outcome, None, None]:
    """Encode the input files of these numbers in worker processes; yield the outcome of each as soon as it is done.

    If there are fewer files than workers, several threads encode one file together. `report` is called every
    `PROGRESS_SECONDS` with the numbers of input bytes and of documents encoded so far.
    """
    waiting, totals = deque(numbers), CONTEXT.Array("q", 2)
    threads = math.ceil(job.workers / max(1, len(numbers)))  # in each worker; one thread, if there are files enough
    run_pool = partial(_run_pool, (job, folder, threads, totals), lambda: report(*totals))
    while waiting:
        suspects = yield from run_pool(waiting, min(job.workers, len(waiting)))
        for number in suspects:
            died_again = yield from run_pool(deque([number]), 1)
            if died_again:
                error = FanformerError(
                    f"two workers died while preparing {job.files[number]} (killed, or out of memory);"
                    " start again, with fewer workers if memory is short"
                )
                yield number, error


def _run_pool(
    encoder_arguments: tuple[Any, ...], report: Callable[[], None], waiting: deque[int], processes: int
) -> Generator[Outcome, None, list[int]]:
    """Encode files from `waiting` in a new pool until none is left or a worker dies, which breaks the pool.

    Returns the numbers of the files that a broken pool had begun or queued; other files stay in `waiting`.
    """
    in_progress: dict[Future[EncodedRecord], int] = {}
    other_processes = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, CONTEXT, _start_worker, encoder_arguments)
    try:
        while waiting or in_progress:
            while waiting and len(in_progress) < FILES_PER_WORKER * processes:
                try:
                    in_progress[pool.submit(encode_file, waiting[0])] = waiting[0]
                except OSError as failure:
                    # `submit` may start a process. If a worker dies meanwhile, the pool's own thread closes a pipe that
                    # this start needs, and Python raises "handle is closed", without the errno of a system's error.
                    if failure.errno is None:
                        raise BrokenProcessPool from failure
                    raise
                waiting.popleft()
            done, _ = wait(in_progress, PROGRESS_SECONDS, FIRST_COMPLETED)
            report()
            for future in done:
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    raise error
                yield in_progress.pop(future), (future.result() if error is None else error)  # type: ignore[misc]
        return []
    except BrokenProcessPool:
        return list(in_progress.values())
    finally:
        for process in set(multiprocessing.active_children()) - other_processes:
            process.kill()
        pool.shutdown(cancel_futures=True)


# -- from inputs to outputs


def run(job: Job, progress: ProgressListener | None) -> Manifest:
    """Encode and assemble all inputs that are not done yet. Raises the FanformerErrors of `prepare.prepare`."""
    records: dict[int, EncodedRecord] = {}
    with writing_to(job.output), work_folder(job.output) as work:
        _assign(work, job)
        with (
            closing(Assembler(job.output, job.settings, work)) as assembler,
            closing(_encode_inputs(job, work, range(len(job.files)), progress)) as outcomes,
        ):
            for number, record in outcomes:
                records[number] = record
                while assembler.next_input in records:
                    assembler.append(EncodedInput(work.path, assembler.next_input), records[assembler.next_input])
            return _publish(job, work, [records[number] for number in sorted(records)], assembler)


def shard_prefix(prefix: str, shard: Shard) -> str:
    """Return the prefix of the work folder of a shard."""
    return f"{prefix}.shard-{shard.number}-of-{shard.count}"


def encode_shard(job: Job, shard: Shard, progress: ProgressListener | None) -> list[EncodedRecord]:
    """Encode the input files of a shard; the results stay in the shard's work folder, for `merge`."""
    with writing_to(job.output), work_folder(shard_prefix(job.output, shard)) as work:
        _assign(work, job)
        numbers = range(shard.number, len(job.files), shard.count)
        with closing(_encode_inputs(job, work, numbers, progress)) as outcomes:
            return [record for _, record in outcomes]


def merge(job: Job, count: int) -> Manifest:
    """Assemble the output from the work folders of `count` shards, and remove the folders.

    Raises:
        CorruptError: an input file has not been encoded, or has changed since.
        InputError: a shard has other inputs or settings, or a line is refused under `strict`.
        InUseError: another process is writing a shard.
    """
    with writing_to(job.output), ExitStack() as locked:
        work = locked.enter_context(work_folder(job.output))
        shards = [Shard(number, count) for number in range(min(count, len(job.files)))]  # others have no file
        folders = [locked.enter_context(work_folder(shard_prefix(job.output, shard))) for shard in shards]
        assignments = {folder.path: folder.read_assignment() for folder in folders}
        for path, assignment in assignments.items():
            if assignment and (difference := job.assignment.difference(assignment)):
                raise InputError(f"{path} was prepared with {difference}; give all shards the same options")
        inputs = [EncodedInput(folders[number % count].path, number) for number in range(len(job.files))]
        finished = list(map(read_finished, inputs, job.files))
        records = [record for record in finished if record is not None]
        if len(records) < len(inputs):
            missing = Counter(number % count for number, record in enumerate(finished) if record is None)
            unfinished = ", ".join(f"{shard}/{count} ({plural(missing[shard], 'file')})" for shard in sorted(missing))
            raise CorruptError(f"{job.output} cannot be merged, files are left of --shard {unfinished}; prepare these")
        encoding = next(assignment.encoding for assignment in assignments.values() if assignment)
        job = replace(job, encoder=replace(job.encoder, encoding=encoding))  # for the manifest: the shards' library
        _assign(work, job)
        with closing(Assembler(job.output, job.settings, work)) as assembler:
            for encoded_input, record in zip(inputs, records, strict=True):
                _check_strict(job, record)
                assembler.append(encoded_input, record)
            manifest = _publish(job, work, records, assembler)
        for folder in folders:
            folder.clear()
        return manifest


def _assign(work: WorkFolder, job: Job) -> None:
    """Record the job in a new work folder. Raises InputError if the folder belongs to another job."""
    begun = work.read_assignment()
    if begun is None:
        refuse_existing_files(job.output)
        work.write_assignment(job.assignment)
    elif difference := job.assignment.difference(begun):
        raise InputError(
            f"{work.path} holds an unfinished preparation of {job.output} with {difference};"
            " finish that one, remove the folder, or choose another output prefix"
        )


def _encode_inputs(
    job: Job, work: WorkFolder, numbers: Sequence[int], progress: ProgressListener | None
) -> Generator[tuple[int, EncodedRecord], None, None]:
    """Yield the number and record of each input file: first those encoded by earlier runs, then others when done.

    A file that fails does not stop the others. At the end, one error names the files that failed, in the order of the
    inputs; it has the type of the first file's error.
    """
    remaining: list[int] = []
    failures: dict[int, FanformerError] = {}
    bytes_before = documents_before = 0
    for number in numbers:
        record = read_finished(EncodedInput(work.path, number), job.files[number])
        if record is None:
            remaining.append(number)
            continue
        bytes_before += record.input.bytes
        documents_before += record.documents
        _check_strict(job, record)
        yield number, record
    total_bytes = bytes_before + sum(job.files[number].stat().st_size for number in remaining)

    def report(input_bytes: int, documents: int) -> None:
        if progress is not None:
            progress(documents_before + documents, (bytes_before + input_bytes) / max(1, total_bytes))

    with closing(_run_workers(job, work.path, remaining, report)) as outcomes:
        for number, outcome in outcomes:
            if isinstance(outcome, EncodedRecord):
                _check_strict(job, outcome)
                yield number, outcome
            elif isinstance(outcome, FanformerError):
                failures[number] = outcome
            else:
                raise outcome
    if failures:
        errors = [failures[number] for number in sorted(failures)]
        messages = list(map(str, errors[:FAILURES_NAMED]))
        if len(failures) > FAILURES_NAMED:
            messages.append(f"and {len(failures) - FAILURES_NAMED} more files")
        if work.has_encoded_inputs:
            messages.append(f"what is done stays in {work.path}, and the same command continues from there")
        error = type(errors[0])("; ".join(messages))
        error.rank_traceback = getattr(errors[0], "rank_traceback", "")  # type: ignore[attr-defined]
        raise error


def _check_strict(job: Job, record: EncodedRecord) -> None:
    if job.strict and record.refused:
        raise InputError(f"{record.refused_examples[0]}; fix the line, or prepare without strict to leave it out")


def _publish(job: Job, work: WorkFolder, records: list[EncodedRecord], assembler: Assembler) -> Manifest:
    """Give the assembled files their names, write the manifest, and clear the work folder.

    Raises InputError if there is no document in any input.
    """
    refused = sum((Counter(record.refused) for record in records), Counter[str]())
    lines = sum(record.lines for record in records)
    if not any(record.documents for record in records):
        work.clear()
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(refused.items()))
        kind, remedy = ("document", "text_field") if job.settings.chat is None else ("conversation", "the template")
        raise InputError(
            f"no {kind} in {plural(len(records), 'input file')}: {plural(lines, 'line')} read, refused: "
            f"{reasons or 'none'}; check the files and {remedy}"
        )
    output = assembler.publish()
    assert lines == output.documents + refused.total()
    manifest = Manifest(
        lines_read=lines,
        documents=output.documents,
        tokens=sum(record.tokens for record in records),
        text_bytes=sum(record.text_bytes for record in records),
        max_token_id=max(record.max_token_id for record in records),
        refused=dict(sorted(refused.items())),
        refused_examples=[example for record in records for example in record.refused_examples][:REFUSED_EXAMPLES],
        settings=job.settings,
        tokenizer=job.tokenizer,
        encoding=job.encoder.encoding,
        inputs=[record.input for record in records],
        outputs=[output],
        versions={
            "megatron_fanformer": __version__,
            "python": platform.python_version(),
            **{tool: version(tool) for tool in TOOLS if find_spec(tool)},
        },
    )
    write_atomically(manifest_path(job.output), encode_manifest(manifest), aside=work.path)
    work.clear()
    return manifest
