"""The work of a preparation: shards encoded by worker processes, assembled in the order of the inputs.

Several machines may share it: each leaves the shards of its inputs in a folder of its own, and `merge` assembles them.
"""

import platform
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec

from megatron_fanformer import __version__
from megatron_fanformer.data.manifest import Encoding, Manifest, encode_manifest, manifest_path
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import CorruptError, FanformerError, InputError
from megatron_fanformer.prepare.outputs import Assembler, refuse_standing_files, writing_to
from megatron_fanformer.prepare.shards import REFUSED_EXAMPLES, ShardRecord, WorkFolder, finished_shard, work_folder
from megatron_fanformer.prepare.verb import Shard
from megatron_fanformer.prepare.workers import Job, Workers
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

    def describe(self) -> str:
        """Return it in one line."""
        share = self.input_bytes / max(1, self.input_bytes_total)
        return f"{plural(self.documents, 'document')}, {share:.0%} of the input"


ProgressListener = Callable[[PrepareProgress], None]


def run(job: Job, progress: ProgressListener | None) -> Manifest:
    """Encode and assemble all inputs that are not done yet. Raises FanformerError as `prepare.prepare`."""
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

    def report(input_bytes: int, documents: int, text_bytes: int) -> None:
        if progress is not None and input_bytes:
            progress(
                PrepareProgress(
                    documents=documents_before + documents,
                    text_bytes=text_bytes,
                    input_bytes=bytes_before + input_bytes,
                    input_bytes_total=total,
                )
            )

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
