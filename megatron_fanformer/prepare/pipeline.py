"""The work of a preparation: shards encoded by worker processes, assembled in the order of the inputs.

Each worker encodes one input file at a time. One that dies (killed, out of memory) breaks the pool. The files in
progress are then tried once more, each alone in a new pool; if a worker dies again, the error names the file.

Several machines may share it: each leaves the shards of its inputs in a folder of its own, and `merge` assembles them.
"""

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
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_fanformer import __version__
from megatron_fanformer.data.manifest import (
    Encoding,
    Manifest,
    Settings,
    TokenizerRecord,
    encode_manifest,
    manifest_path,
)
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import CorruptError, FanformerError, InputError
from megatron_fanformer.prepare.chats import ChatEncoder
from megatron_fanformer.prepare.documents import DocumentFile
from megatron_fanformer.prepare.encoding import BlockEncoder, EncoderChoice, encode_blocks, npy_blocks
from megatron_fanformer.prepare.inputs import InputFile, input_sha256, recorded_path
from megatron_fanformer.prepare.outputs import Assembler, refuse_standing_files, writing_to
from megatron_fanformer.prepare.shards import (
    REFUSED_EXAMPLES,
    Assignment,
    ShardFiles,
    ShardRecord,
    ShardWriter,
    WorkFolder,
    finished_shard,
    work_folder,
)
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
"""Called with the documents encoded so far, and the share of the input's bytes."""


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
    """Makes the shards of input files; `totals` are the input bytes and documents of all workers."""

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
            self._count(file.bytes_read - counted, len(block.lengths))
            counted = file.bytes_read
        self._count(file.bytes_read - counted)
        return writer.finish(file.bytes_read, file.sha256)

    def _count(self, input_bytes: int, documents: int = 0) -> None:
        with self._totals:
            self._totals[0] += input_bytes
            self._totals[1] += documents


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
        reason = f"{name} {what} ({error.strerror or error}); check its disk"
        raise FanformerError(f"{reason}, and run the same command to continue") from None
    except Exception as error:
        failure = FanformerError(f"{path} could not be prepared ({type(error).__name__}: {error})")
        failure.rank_traceback = traceback.format_exc()  # type: ignore[attr-defined]
        raise failure from None


# -- in the parent


Outcomes = Generator[tuple[int, ShardRecord | Exception], None, None]


class Workers:
    """The worker processes of one preparation.

    Args:
        folder: the folder that shards are written into.
        report: called every `PROGRESS_SECONDS` with the input bytes and documents encoded so far.
    """

    def __init__(self, job: Job, folder: Path, report: Callable[[int, int], None]) -> None:
        self._job, self._folder, self._report = job, folder, report
        self._totals = CONTEXT.Array("q", 2)
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


# -- from inputs to outputs


def run(job: Job, progress: ProgressListener | None) -> Manifest:
    """Encode and assemble all inputs that are not done yet. Raises the FanformerErrors of `prepare.prepare`."""
    records: dict[int, ShardRecord] = {}
    with writing_to(job.output), work_folder(job.output) as work:
        _begin(job, work)
        with (
            closing(Assembler(job.output, job.settings, work)) as assembler,
            closing(_encoded(job, work, range(len(job.files)), progress)) as shards,
        ):
            for number, record in shards:
                records[number] = record
                while (ready := records.get(assembler.next_input)) is not None:
                    assembler.append(work.shard(assembler.next_input), ready)
            return _publish(job, work, [records[number] for number in sorted(records)], assembler)


def shard_prefix(prefix: str, shard: Shard) -> str:
    """Return the prefix of the work folder of a shard."""
    return f"{prefix}.shard-{shard.number}-of-{shard.count}"


def encode_shard(job: Job, shard: Shard, progress: ProgressListener | None) -> list[ShardRecord]:
    """Encode every `count`-th input; the result stays in the shard's folder, for `merge`."""
    with writing_to(job.output), work_folder(shard_prefix(job.output, shard)) as work:
        _begin(job, work)
        numbers = range(shard.number, len(job.files), shard.count)
        with closing(_encoded(job, work, numbers, progress)) as shards:
            return [record for _, record in shards]


def merge(job: Job, count: int) -> Manifest:
    """Assemble `count` shards, once all are whole and of this job's inputs and settings; then remove their folders.

    Raises:
        CorruptError: shards are missing, or not whole.
        InputError: shards are of other inputs or settings.
        InUseError: a shard is being written.
    """
    with writing_to(job.output), ExitStack() as folders:
        work = folders.enter_context(work_folder(job.output))
        shards = [Shard(number, count) for number in range(min(count, len(job.files)))]
        parts = [folders.enter_context(work_folder(shard_prefix(job.output, shard))) for shard in shards]
        encodings: list[Encoding] = []
        for part in parts:
            if (begun := part.read_assignment()) is None:
                continue
            if difference := job.assignment.difference(begun):
                raise InputError(f"{part.path} was prepared with {difference}; give all shards the same options")
            encodings.append(begun.encoding)
        files = [parts[number % count].shard(number) for number in range(len(job.files))]
        records = list(map(finished_shard, files, job.files))
        left = Counter(number % count for number, record in enumerate(records) if record is None)
        if left:
            named = ", ".join(f"{number}/{count} ({plural(files, 'file')})" for number, files in sorted(left.items()))
            raise CorruptError(f"{job.output} cannot be merged, files are left of --shard {named}; prepare these")
        job = replace(job, encoder=replace(job.encoder, encoding=encodings[0]))
        _begin(job, work)
        whole = [record for record in records if record is not None]
        with closing(Assembler(job.output, job.settings, work)) as assembler:
            for shard_files, record in zip(files, whole, strict=True):
                _refuse_strictly(job, record)
                assembler.append(shard_files, record)
            manifest = _publish(job, work, whole, assembler)
        for part in parts:
            part.end()
        return manifest


def _begin(job: Job, work: WorkFolder) -> None:
    """Write the assignment of a new work folder. Raises InputError for another preparation's."""
    begun = work.read_assignment()
    if begun is None:
        refuse_standing_files(job.output)
        work.write_assignment(job.assignment)
    elif difference := job.assignment.difference(begun):
        raise InputError(
            f"{work.path} holds an unfinished preparation of {job.output} with {difference};"
            " finish that one, remove the folder, or choose another output prefix"
        )


def _encoded(
    job: Job, work: WorkFolder, numbers: Sequence[int], progress: ProgressListener | None
) -> Generator[tuple[int, ShardRecord], None, None]:
    """Yield number and record of each of these inputs' shards: of those that are done, then of others once they are.

    Raises, after all others, one error for all files that failed, of the first one's kind.
    """
    left: list[int] = []
    failures: list[FanformerError] = []
    bytes_before = documents_before = 0
    for number in numbers:
        if (record := finished_shard(work.shard(number), job.files[number])) is None:
            left.append(number)
            continue
        bytes_before += record.input.bytes
        documents_before += record.documents
        _refuse_strictly(job, record)
        yield number, record
    total = bytes_before + sum(job.files[number].stat().st_size for number in left)

    def report(input_bytes: int, documents: int) -> None:
        if progress is not None:
            progress(documents_before + documents, (bytes_before + input_bytes) / max(1, total))

    with closing(Workers(job, work.path, report).encode(left)) as outcomes:
        for number, outcome in outcomes:
            if isinstance(outcome, ShardRecord):
                _refuse_strictly(job, outcome)
                yield number, outcome
            elif isinstance(outcome, FanformerError):
                failures.append(outcome)
            else:
                raise outcome
    if failures:
        first, named = failures[0], "; ".join(map(str, failures[:FAILURES_NAMED]))
        more = f"; and {len(failures) - FAILURES_NAMED} more files" if len(failures) > FAILURES_NAMED else ""
        kept = f"; what is done stays in {work.path}, and the same command continues from there"
        error = type(first)(f"{named}{more}{kept if work.holds_shards else ''}")
        error.rank_traceback = getattr(first, "rank_traceback", "")  # type: ignore[attr-defined]
        raise error


def _refuse_strictly(job: Job, record: ShardRecord) -> None:
    if job.strict and record.refused:
        raise InputError(f"{record.refused_examples[0]}; fix the line, or prepare without strict to leave it out")


def _publish(job: Job, work: WorkFolder, records: list[ShardRecord], assembler: Assembler) -> Manifest:
    refused = sum((Counter(record.refused) for record in records), Counter[str]())
    lines = sum(record.lines for record in records)
    if not any(record.documents for record in records):
        work.end()
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
    work.end()
    return manifest
