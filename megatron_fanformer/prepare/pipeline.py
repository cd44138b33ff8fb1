"""The work of a preparation: shards encoded by worker processes, assembled in the order of the inputs.

Several machines may share it: each leaves the shards of its inputs in a folder of its own, and `merge` assembles them.
"""

import glob
import os
import platform
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from megatron_fanformer import __version__
from megatron_fanformer.data.manifest import (
    Encoding,
    Manifest,
    TokenFiles,
    encode_manifest,
    manifest_path,
    sum_by_source,
)
from megatron_fanformer.errors import CorruptError, FanformerError, InputError
from megatron_fanformer.prepare.assembly import STANDING_SUFFIXES, Assembler, writing_to
from megatron_fanformer.prepare.encoding import TokenizersDisagree
from megatron_fanformer.prepare.inputs import InputFile, recorded_path
from megatron_fanformer.prepare.progress import PrepareProgress, ProgressListener
from megatron_fanformer.prepare.shards import (
    REFUSED_EXAMPLES,
    Assignment,
    ShardRecord,
    WorkFolder,
    finished_shard,
    work_folder,
)
from megatron_fanformer.prepare.verb import Shard
from megatron_fanformer.prepare.workers import Job, Refused, Task, Workers
from megatron_fanformer.terminal import plural

TOOLS = ("gigatoken", "tokenizers", "sentencepiece", "numpy", "pyarrow")
FAILURES_NAMED = 5

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class PreparationJob(Job):
    """A preparation that has been checked: its files exist, its tokenizer loads."""

    files: list[InputFile]
    output: str
    workers: int
    progress: ProgressListener | None = None

    @property
    def assignment(self) -> Assignment:
        """Return the record that the work folder is compared with."""
        return Assignment(
            inputs=[recorded_path(file) for file in self.files],
            settings=self.settings,
            tokenizer=self.tokenizer,
            encoding=self.encoder.encoding,
        )


def run(job: PreparationJob) -> Manifest:
    """Do all that is not done yet. For the errors see `prepare`."""

    def prepare(job: PreparationJob, work: WorkFolder) -> Manifest:
        records: dict[int, ShardRecord] = {}
        with (
            closing(Assembler(job.output, job.settings, job.tokenizer, work)) as assembler,
            closing(_encoded(job, work, range(len(job.files)))) as shards,
        ):
            for number, record in shards:
                records[number] = record
                while (ready := records.get(assembler.next_input)) is not None:
                    assembler.append(work.shard(assembler.next_input), ready)
            return _publish(job, work, [records[number] for number in sorted(records)], assembler)

    with writing_to(job.output), work_folder(job.output) as work:
        return _with_checked_ids(job, work, prepare)


def shard_prefix(prefix: str, shard: Shard) -> str:
    """Return the prefix of the work folder of a shard."""
    return f"{prefix}.shard-{shard.number}-of-{shard.count}"


def encode_shard(job: PreparationJob, shard: Shard) -> list[ShardRecord]:
    """Encode every `count`-th input; the result stays in the shard's folder, for `merge`."""

    def encode(job: PreparationJob, work: WorkFolder) -> list[ShardRecord]:
        with closing(_encoded(job, work, range(shard.number, len(job.files), shard.count))) as shards:
            return [record for _, record in shards]

    with writing_to(job.output), work_folder(shard_prefix(job.output, shard)) as work:
        return _with_checked_ids(job, work, encode)


def merge(job: PreparationJob, count: int) -> Manifest:
    """Assemble `count` shards, once all are whole and of this job's inputs and settings; then remove their folders.

    Raises:
        CorruptError: shards are missing, or not whole.
        InputError: shards are of other inputs or settings, or disagree about gigatoken's ids.
        InUseError: a shard is being written.
    """
    with writing_to(job.output), ExitStack() as folders:
        work = folders.enter_context(work_folder(job.output))
        shards = [Shard(number, count) for number in range(min(count, len(job.files)))]
        parts = [folders.enter_context(work_folder(shard_prefix(job.output, shard))) for shard in shards]
        encodings: dict[str, tuple[Shard, Encoding]] = {}  # by backend
        for shard, part in zip(shards, parts, strict=True):
            if (begun := part.read_assignment()) is None:
                continue
            if difference := job.assignment.difference(begun):
                raise InputError(f"{part.path} was prepared with {difference}; give all shards the same options")
            encodings.setdefault(begun.encoding.backend, (shard, begun.encoding))
        files = [parts[number % count].shard(number) for number in range(len(job.files))]
        records = list(map(finished_shard, files, job.files))
        left = Counter(number % count for number, record in enumerate(records) if record is None)
        if left:
            named = ", ".join(f"{number}/{count} ({plural(files, 'file')})" for number, files in sorted(left.items()))
            raise CorruptError(f"{job.output} cannot be merged, files are left of --shard {named}; prepare these")
        if len(encodings) > 1:
            named = ", ".join(f"{shard} by {one.backend} ({one.reason})" for shard, one in encodings.values())
            raise InputError(
                f"the shards' ids are by several libraries: {named}; remove {job.output}.shard-*, and prepare all with"
                " the same --backend"
            )
        ((_, encoding),) = encodings.values()
        job = replace(job, encoder=replace(job.encoder, encoding=encoding))
        _begin(job, work)
        whole = [record for record in records if record is not None]
        with closing(Assembler(job.output, job.settings, job.tokenizer, work)) as assembler:
            for shard_files, record in zip(files, whole, strict=True):
                _refuse_strictly(job, record)
                assembler.append(shard_files, record)
            manifest = _publish(job, work, whole, assembler)
        for part in parts:
            part.end()
        return manifest


def _begin(job: PreparationJob, work: WorkFolder) -> Assignment:
    """Return the assignment of a work folder; in a new one, this job's. Raises InputError for another one's."""
    begun = work.read_assignment()
    if begun is None:
        _refuse_standing_files(job.output)
        work.write_assignment(job.assignment)
    elif difference := job.assignment.difference(begun):
        raise InputError(
            f"{work.path} holds an unfinished preparation of {job.output} with {difference};"
            " finish that one, remove the folder, or choose another output prefix"
        )
    return begun or job.assignment


def _with_checked_ids(
    job: PreparationJob, work: WorkFolder, encode: Callable[[PreparationJob, WorkFolder], Result]
) -> Result:
    """Encode; where gigatoken's ids turn out to be wrong, encode all again by the exact library."""
    begun = _begin(job, work).encoding
    if begun.backend != job.encoder.encoding.backend and begun.reason is not None:
        job = replace(job, encoder=job.encoder.without_gigatoken(begun.reason))
    try:
        return encode(job, work)
    except TokenizersDisagree as disagreement:
        job = replace(job, encoder=job.encoder.without_gigatoken(f"gigatoken's ids differ in {disagreement}"))
        work.clear()
        work.write_assignment(job.assignment)
        return encode(job, work)


def _refuse_standing_files(prefix: str) -> None:
    """Raise InputError if there are files under the output names of a prefix, or of its parts."""
    parts = sorted(glob.glob(glob.escape(prefix) + "-" + 5 * "[0-9]" + ".*"))
    for path in (*(prefix + suffix for suffix in STANDING_SUFFIXES), *parts):
        if os.path.exists(path):
            raise InputError(
                f"{path} exists, and there is no manifest of a complete preparation; choose another output prefix,"
                f" or remove the files of {prefix}"
            )


def _encoded(
    job: PreparationJob, work: WorkFolder, numbers: Sequence[int]
) -> Generator[tuple[int, ShardRecord], None, None]:
    """Yield number and record of each of these inputs' shards: of those that are done, then of others once they are.

    Raises, after all others, one error for all files that failed, of the first one's kind.
    """
    tasks: list[Task] = []
    failures: list[FanformerError] = []
    bytes_before = documents_before = 0
    for number in numbers:
        if (record := finished_shard(work.shard(number), job.files[number])) is None:
            tasks.append(Task(number, job.files[number]))
            continue
        _refuse_strictly(job, record)
        bytes_before += record.input.bytes
        documents_before += record.documents
        yield number, record
    total = bytes_before + sum(task.path.stat().st_size for task in tasks)

    def report(input_bytes: int, documents: int, text_bytes: int) -> None:
        if job.progress is not None and input_bytes:
            job.progress(
                PrepareProgress(
                    documents=documents_before + documents,
                    text_bytes=text_bytes,
                    input_bytes=bytes_before + input_bytes,
                    input_bytes_total=total,
                )
            )

    settings = Job(tokenizer=job.tokenizer, settings=job.settings, encoder=job.encoder, strict=job.strict)
    with closing(Workers(settings, work.path, job.workers, report).encode(tasks)) as outcomes:
        for task, outcome in outcomes:
            if isinstance(outcome, ShardRecord):
                yield task.number, outcome
            elif isinstance(outcome, TokenizersDisagree):
                raise TokenizersDisagree(f"{outcome} of {task.path}")
            elif isinstance(outcome, FanformerError) and not isinstance(outcome, Refused):
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


def _refuse_strictly(job: PreparationJob, record: ShardRecord) -> None:
    if job.strict and record.refused:
        raise Refused(f"{record.refused_examples[0]}; fix the line, or prepare without strict to leave it out")


def _publish(job: PreparationJob, work: WorkFolder, records: list[ShardRecord], assembler: Assembler) -> Manifest:
    if not any(record.documents for record in records):
        work.clear()
        refused = sum((Counter(record.refused) for record in records), Counter[str]())
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(refused.items()))
        kind, remedy = ("document", "text_field") if job.settings.chat is None else ("conversation", "the template")
        files, lines = plural(len(records), "input file"), plural(sum(record.lines for record in records), "line")
        raise InputError(
            f"no {kind} in {files}: {lines} read, refused: {reasons or 'none'}; check the files and {remedy}"
        )
    manifest = _manifest(job, records, assembler.publish())
    if job.settings.part_bytes is not None:
        suffix = ".npy" if job.settings.format == "npy" else ""
        words = "".join(f"{output.prefix}{suffix}\n" for output in manifest.outputs)
        work.publish(words.encode(), Path(job.output + ".blend"))
    work.publish(encode_manifest(manifest), manifest_path(job.output))
    work.end()
    return manifest


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
