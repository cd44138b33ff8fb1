"""The work of a preparation, in several processes.

The parent reads blocks of lines, in order; workers parse and tokenize them; the parent writes the results in
the order of the blocks. So the output does not depend on the number of workers, and memory is bounded by the
few blocks under way.
"""

import multiprocessing
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megatron_fanformer.data.documents import DocumentFile
from megatron_fanformer.data.encoding import EncodedBlock, encode_block, start_worker
from megatron_fanformer.data.manifest import InputRecord, Manifest, RefusedLine, Settings, TokenizerRecord
from megatron_fanformer.data.token_files import TokenWriter
from megatron_fanformer.errors import FanformerError, InputError

# Blocks handed out beyond one a worker: enough that no worker waits for the parent to write.
BLOCKS_AHEAD = 2
REFUSED_EXAMPLES = 10


@dataclass(frozen=True, kw_only=True)
class PrepareProgress:
    """How far a preparation has come."""

    documents: int
    text_bytes: int
    """UTF-8 bytes of the documents' text."""
    input_bytes: int
    """Bytes of the input files that have been worked off, as they are on disk (compressed)."""
    input_bytes_total: int


ProgressListener = Callable[[PrepareProgress], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A preparation that has been checked: its files exist, its tokenizer loads."""

    files: list[Path]
    output: str
    tokenizer: TokenizerRecord
    settings: Settings
    workers: int
    strict: bool


@dataclass
class _Totals:
    """The sums over all blocks so far."""

    lines: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    max_token_id: int = -1
    refused: Counter[str] = field(default_factory=Counter)

    def add(self, block: EncodedBlock) -> None:
        self.lines += block.lines
        self.documents += block.documents
        self.tokens += block.token_count
        self.text_bytes += block.text_bytes
        self.max_token_id = max(self.max_token_id, block.max_token_id)
        self.refused.update(block.refused)


@dataclass(frozen=True)
class _Pending:
    """A block under way."""

    file: Path
    input_bytes: int  # of all files, read up to the end of this block
    result: "Future[EncodedBlock]"


class Pipeline:
    """One run over all inputs of a job."""

    def __init__(self, job: Job, progress: ProgressListener | None) -> None:
        self._job = job
        self._progress = progress
        self._totals = _Totals()
        self._lines_of: Counter[Path] = Counter()
        self._examples: list[RefusedLine] = []
        self._inputs: list[InputRecord] = []
        self._input_bytes_total = sum(file.stat().st_size for file in job.files)
        self._writer: TokenWriter | None = None

    def run(self) -> Manifest:
        """Do it, and leave either everything or nothing. For the errors see `prepare`."""
        try:
            with self._pool() as pool:
                self._pump(pool)
            return self._publish()
        except BrokenProcessPool as error:
            raise FanformerError(
                f"a worker process died while preparing {self._job.output} (killed, or out of memory):"
                " nothing was published; start again, with fewer workers if memory is short"
            ) from error
        finally:
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _pool(self) -> Iterator[ProcessPoolExecutor]:
        """Worker processes, started afresh: forked ones would inherit threads and locks in any state."""
        job = self._job
        pool = ProcessPoolExecutor(
            max_workers=job.workers,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=start_worker,
            initargs=(job.tokenizer.path, job.tokenizer.eod_id, job.settings.text_field, job.settings.dtype),
        )
        try:
            yield pool
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _pump(self, pool: ProcessPoolExecutor) -> None:
        """Keep a bounded number of blocks under way; take the results in the order of the blocks."""
        pending: deque[_Pending] = deque()
        for file, input_bytes, block in self._blocks():
            pending.append(_Pending(file, input_bytes, pool.submit(encode_block, block)))
            if len(pending) >= self._job.workers + BLOCKS_AHEAD:
                self._take(pending.popleft())
        while pending:
            self._take(pending.popleft())

    def _blocks(self) -> Iterator[tuple[Path, int, bytes]]:
        """All blocks of all files: the file, the input bytes read up to there, the block."""
        before = 0
        for path in self._job.files:
            modified_ns = path.stat().st_mtime_ns
            file = DocumentFile(path)
            for block in file.blocks():
                yield path, before + file.bytes_read, block
            before += file.bytes_read
            record = InputRecord(
                path=os.path.abspath(path), bytes=file.bytes_read, sha256=file.sha256, modified_ns=modified_ns
            )
            self._inputs.append(record)

    def _take(self, pending: _Pending) -> None:
        """Write one block's documents, count its refused lines, tell the listener."""
        block = pending.result.result()
        self._note_refused(pending.file, block)
        if block.documents:
            if self._writer is None:
                self._writer = TokenWriter(self._job.output, self._job.settings.dtype)
            self._writer.append(block.tokens, block.lengths)
        self._totals.add(block)
        self._lines_of[pending.file] += block.lines
        if self._progress is not None:
            self._progress(
                PrepareProgress(
                    documents=self._totals.documents,
                    text_bytes=self._totals.text_bytes,
                    input_bytes=pending.input_bytes,
                    input_bytes_total=self._input_bytes_total,
                )
            )

    def _note_refused(self, file: Path, block: EncodedBlock) -> None:
        for number, reason in block.examples[: REFUSED_EXAMPLES - len(self._examples)]:
            line = self._lines_of[file] + number + 1
            self._examples.append(RefusedLine(file=str(file), line=line, reason=reason))
        if self._job.strict and self._examples:
            raise InputError(f"{self._examples[0]}: mend the line, or prepare without strict to leave it out")

    def _publish(self) -> Manifest:
        totals = self._totals
        if self._writer is None:
            reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(totals.refused.items()))
            raise InputError(
                f"the {len(self._job.files)} input files hold no document: {totals.lines} lines read,"
                f" refused: {reasons or 'none'}; check the files and text_field"
            )
        assert totals.lines == totals.documents + totals.refused.total()
        manifest = Manifest(
            lines_read=totals.lines,
            documents=totals.documents,
            tokens=totals.tokens,
            text_bytes=totals.text_bytes,
            max_token_id=totals.max_token_id,
            refused=dict(sorted(totals.refused.items())),
            refused_examples=self._examples,
            settings=self._job.settings,
            tokenizer=self._job.tokenizer,
            inputs=self._inputs,
            outputs=self._writer.finish(),
        )
        self._writer.publish(manifest)
        return manifest
