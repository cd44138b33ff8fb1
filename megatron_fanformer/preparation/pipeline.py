"""The work of a preparation: shards encoded by worker processes, assembled in the order of the inputs."""

import glob
import os
import platform
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from megatron_fanformer import __version__
from megatron_fanformer.data.blends import reads_back
from megatron_fanformer.data.manifest import (
    Manifest,
    Settings,
    TokenFiles,
    TokenizerRecord,
    encode_manifest,
    manifest_path,
    sum_by_source,
)
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.preparation.assembly import Assembler, remove_parts
from megatron_fanformer.preparation.encoding import TokenizersDisagree
from megatron_fanformer.preparation.id_encoders import EncoderChoice
from megatron_fanformer.preparation.remote_inputs import InputFile, recorded_path
from megatron_fanformer.preparation.shards import REFUSED_EXAMPLES, ShardRecord, is_unchanged
from megatron_fanformer.preparation.token_writer import standing_suffixes, writing_to
from megatron_fanformer.preparation.work_folder import Assignment, WorkFolder, work_folder
from megatron_fanformer.preparation.workers import Done, Failed, Refused, Task, WorkDone, WorkerPool, WorkerSetup
from megatron_fanformer.terminal import plural

TOOLS = ("gigatoken", "tokenizers", "sentencepiece", "numpy", "pyarrow")
FAILURES_NAMED = 5


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


@dataclass(frozen=True, kw_only=True)
class PreparationJob:
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
        """Return what the work folder is compared with."""
        return Assignment(
            inputs=[recorded_path(file) for file in self.files],
            settings=self.settings,
            tokenizer=self.tokenizer,
            encoding=self.encoder.encoding,
        )


def run(job: PreparationJob, progress: ProgressListener | None) -> Manifest:
    """Do all that is not done yet. For the errors see `prepare`."""
    with writing_to(job.output), work_folder(job.output) as work:
        begun = work.read_assignment()
        if begun is None:
            _refuse_standing_files(job.output)
            work.write_assignment(job.assignment)
        elif difference := job.assignment.difference(begun):
            raise InputError(
                f"{work.path} holds an unfinished preparation of {job.output} with {difference};"
                " finish that one, remove the folder, or choose another output prefix"
            )
        elif begun.encoding.backend != job.encoder.encoding.backend and begun.encoding.reason is not None:
            job = replace(job, encoder=job.encoder.without_gigatoken(begun.encoding.reason))
        try:
            return _Run(job, work, progress).run()
        except TokenizersDisagree as disagreement:
            # Whatever gigatoken has encoded is doubtful now: all of it is encoded again.
            reason = f"gigatoken's ids differ in {disagreement}"
            job = replace(job, encoder=job.encoder.without_gigatoken(reason))
            remove_parts(job.output)
            work.clear()
            work.write_assignment(job.assignment)
            return _Run(job, work, progress).run()


def _refuse_standing_files(prefix: str) -> None:
    """Raise InputError if there are files under the output names of a prefix, or of its parts."""
    parts = sorted(glob.glob(glob.escape(prefix) + "-" + 5 * "[0-9]" + ".*"))
    for path in (*(prefix + suffix for suffix in standing_suffixes()), *parts):
        if os.path.exists(path):
            raise InputError(
                f"{path} exists, and there is no manifest of a complete preparation; choose another output prefix,"
                f" or remove the files of {prefix}"
            )


class _Run:
    """One run over what remains to be done in a work folder."""

    def __init__(self, job: PreparationJob, work: WorkFolder, progress: ProgressListener | None) -> None:
        self._job = job
        self._work = work
        self._listener = progress
        self._assembler = Assembler(job.output, job.settings, job.tokenizer, work)
        self._records: dict[int, ShardRecord] = {}
        self._failures: list[FanformerError] = []
        total = sum(file.stat().st_size for file in job.files)
        self._sums: Counter[str] = Counter(documents=0, text_bytes=0, input_bytes=0, input_bytes_total=total)

    def run(self) -> Manifest:
        with closing(self._assembler):
            return self._prepare()

    def _prepare(self) -> Manifest:
        self._assembler.resume(self._job.workers)
        self._find_done()
        tasks = [Task(number, file) for number, file in enumerate(self._job.files) if number not in self._records]
        self._assemble()
        setup = WorkerSetup(
            encoder=self._job.encoder,
            settings=self._job.settings,
            vocab_size=self._job.tokenizer.vocab_size,
            folder=self._work.path,
            strict=self._job.strict,
        )
        with WorkerPool(setup, self._job.workers) as pool:
            for event in pool.work(tasks):
                self._handle(event)
        if self._failures:
            raise self._all_failures()
        return self._publish()

    def _find_done(self) -> None:
        """Take the shards that are complete and whose inputs are unchanged."""
        for number, file in enumerate(self._job.files):
            shard = self._work.shard(number)
            record = shard.read_record()
            if record is None:
                continue
            if not is_unchanged(record.input):
                if self._assembler.has_published_of(number):
                    raise InputError(
                        f"{file} has changed since its documents were written to {self._job.output}; remove"
                        f" {self._job.output}-* and {self._work.path}, and prepare again"
                    )
                continue
            if number < self._assembler.next_input or shard.is_whole(record):
                self._take(number, record)
                self._sums.update(input_bytes=record.input.bytes, documents=record.documents)

    def _take(self, number: int, record: ShardRecord) -> None:
        if self._job.strict and record.refused:
            raise Refused(f"{record.refused_examples[0]}; fix the line, or prepare without strict to leave it out")
        self._records[number] = record

    def _handle(self, event: WorkDone | Done | Failed) -> None:
        match event:
            case Done(task, record):
                self._take(task.number, record)
                self._assemble()
            case Failed(task, TokenizersDisagree() as error):
                raise TokenizersDisagree(f"{error} of {task.path}")
            case Failed(_, FanformerError() as error):
                if isinstance(error, Refused):
                    raise error
                self._failures.append(error)
            case WorkDone():
                self._sums.update(asdict(event))
                if self._listener is not None:
                    self._listener(PrepareProgress(**self._sums))

    def _assemble(self) -> None:
        while (record := self._records.get(self._assembler.next_input)) is not None:
            self._assembler.append(record)

    def _all_failures(self) -> FanformerError:
        """Return one error for all files that failed, of the first one's kind."""
        first = self._failures[0]
        kept = f"; what is done stays in {self._work.path}, and the same command continues from there"
        more = "".join(f"; {error}" for error in self._failures[1:FAILURES_NAMED])
        left = len(self._failures) - FAILURES_NAMED
        message = f"{first}{more}" + (f"; and {left} more files" if left > 0 else "")
        error = type(first)(message + (kept if self._records else ""))
        error.rank_traceback = getattr(first, "rank_traceback", "")  # type: ignore[attr-defined]
        return error

    def _publish(self) -> Manifest:
        job = self._job
        records = [self._records[number] for number in range(len(job.files))]
        if not any(record.documents for record in records):
            self._work.clear()
            raise NothingFound(_nothing_found(records, job.settings), records)
        manifest = _manifest(job, records, self._assembler.finish())
        if job.settings.part_bytes is not None:
            self._work.publish(blend_of(job.settings, manifest.outputs), Path(job.output + ".blend"))
        self._work.publish(encode_manifest(manifest), manifest_path(job.output))
        self._work.end()
        return manifest


class NothingFound(InputError):
    """The inputs hold no document; what was read of them is in `records`."""

    def __init__(self, message: str, records: Sequence[ShardRecord] = ()) -> None:
        super().__init__(message)
        self.records = records


def _nothing_found(records: list[ShardRecord], settings: Settings) -> str:
    refused = sum((Counter(record.refused) for record in records), Counter[str]())
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(refused.items()))
    what, remedy = ("document", "text_field") if settings.chat is None else ("conversation", "the template")
    files, lines = plural(len(records), "input file"), plural(sum(each.lines for each in records), "line")
    return f"no {what} in {files}: {lines} read, refused: {reasons or 'none'}; check the files and {remedy}"


def _manifest(job: PreparationJob, records: list[ShardRecord], outputs: list[TokenFiles]) -> Manifest:
    refused = sum((Counter(record.refused) for record in records), Counter[str]())
    examples = [example for record in records for example in record.refused_examples]
    documents = sum(record.documents for record in records)
    lines = sum(record.lines for record in records)
    assert lines == documents + refused.total()
    assert documents == sum(output.documents for output in outputs)
    return Manifest(
        lines_read=lines,
        documents=documents,
        tokens=sum(record.tokens for record in records),
        text_bytes=sum(record.text_bytes for record in records),
        max_token_id=max(record.max_token_id for record in records),
        refused=dict(sorted(refused.items())),
        refused_examples=examples[:REFUSED_EXAMPLES],
        settings=job.settings,
        tokenizer=job.tokenizer,
        encoding=job.encoder.encoding,
        inputs=[record.input for record in records],
        outputs=outputs,
        versions={
            "megatron_fanformer": __version__,
            "python": platform.python_version(),
            **{tool: version(tool) for tool in TOOLS if find_spec(tool)},
        },
        by_source=sum_by_source(record.by_source for record in records),
    )


def blend_of(settings: Settings, outputs: list[TokenFiles]) -> bytes:
    """Return a list of token files in one folder, as `data.train_data` takes it (@FILE): each counts by its size."""
    return "".join(f"{_blend_word(settings, output.prefix)}\n" for output in outputs).encode()


def refuse_outside_blends(settings: Settings, prefix: str) -> None:
    """Raise InputError for a prefix of token files whose name in a blend would be read as something else."""
    word = _blend_word(settings, Path(prefix).name)
    if not reads_back(word):
        raise InputError(
            f"the .blend of this output would hold {word!r}, which is read as something else (several words, a label, a"
            " comment, another file, a weight); choose an output named by letters, digits, - and ."
        )


def _blend_word(settings: Settings, name: str) -> str:
    return f"{name}.npy" if settings.format == "npy" and settings.chat is None else name  # chats in rows are a folder
