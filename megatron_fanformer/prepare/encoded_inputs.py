"""The work folder of a preparation, PREFIX.parts/, which keeps encoded input files until the output is complete.

An encoded input file consists of `NNNNNN.tokens`, of `NNNNNN.documents` (an Arrow stream with one row per document)
and of the record `NNNNNN.json`, which is written last. An interrupted preparation does not encode an input file again
that has a record. Conversations also have `NNNNNN.mask`, a byte per token, and a row for each refused line.

The work folder also holds the assignment (inputs and settings) and the unfinished output files. One process at a time
holds the folder's lock. The folder is removed when the preparation is complete.
"""

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
from msgspec.structs import asdict

from megatron_fanformer.data import ledger
from megatron_fanformer.data.manifest import Encoding, InputRecord, Manifest, RefusedLine, Settings, TokenizerRecord
from megatron_fanformer.durable_files import take_lock, write_atomically
from megatron_fanformer.errors import InUseError
from megatron_fanformer.prepare.encoding import EncodedBlock
from megatron_fanformer.prepare.inputs import InputFile, input_sha256, recorded_path

REFUSED_EXAMPLES = 10
LOCK = "lock"


class EncodedRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The counts of an encoded input file: lines == documents + the sum of refused."""

    input: InputRecord
    lines: int
    documents: int
    tokens: int
    text_bytes: int
    max_token_id: int
    """The largest token id; -1 if there is no document."""
    refused: dict[str, int]
    refused_examples: list[RefusedLine]
    sizes: dict[str, int]
    """Bytes of each file, by suffix."""


@dataclass(frozen=True)
class EncodedInput:
    """The paths of the files in `folder` that hold input file `number` of the job, encoded."""

    folder: Path
    number: int

    def path(self, suffix: str) -> Path:
        """Return the path of the file with a suffix: tokens, documents, mask or json."""
        return self.folder / f"{self.number:06d}.{suffix}"

    def batches(self) -> Iterator[Any]:
        """Yield the rows of the documents, as Arrow record batches with columns id, source, line and length.

        Conversations also have the columns learned and outcome; a refused one has a row of length 0.
        """
        with self.path("documents").open("rb") as file, pyarrow.ipc.open_stream(file) as reader:
            yield from reader


def read_finished(encoded: EncodedInput, file: InputFile) -> EncodedRecord | None:
    """Return the record of an input file if the file is completely encoded and has not changed since; else None."""
    with suppress(FileNotFoundError, msgspec.MsgspecError):  # no record, or one of an earlier version
        record = msgspec.json.decode(encoded.path("json").read_bytes(), type=EncodedRecord)
        sizes = {suffix: encoded.path(suffix).stat().st_size for suffix in record.sizes}
        if sizes == record.sizes and is_unchanged(file, record.input):
            return record
    return None


def is_unchanged(file: InputFile, record: InputRecord) -> bool:
    """Return whether an input file has the recorded content.

    Equal sizes, paths and modification times suffice. If only the sizes are equal, the contents are compared.
    """
    status = file.stat()
    is_untouched = recorded_path(file) == record.path and status.st_mtime_ns == record.modified_ns
    return status.st_size == record.bytes and (is_untouched or input_sha256(file) == record.sha256)


class EncodedWriter:
    """Writes one encoded input file, block by block."""

    def __init__(self, encoded: EncodedInput, input_path: InputFile, *, is_chats: bool = False) -> None:
        self._encoded, self._input_path = encoded, input_path
        self._modified_ns = input_path.stat().st_mtime_ns
        columns = ledger.schema(is_chats=is_chats)  # LedgerWriter adds the columns that are left out here
        self._schema = pyarrow.schema([column for column in columns if column.name not in ("shard", "first_token")])
        self._streams: dict[str, Any] = {}
        for suffix in ("tokens", "documents", *(["mask"] if is_chats else [])):
            # A new file: a worker that outlives its killed parent for a moment may still write to the old one.
            encoded.path(suffix).unlink(missing_ok=True)
            self._streams[suffix] = encoded.path(suffix).open("wb")
        self._rows = pyarrow.ipc.new_stream(self._streams["documents"], self._schema)
        self._counts: Counter[str] = Counter(lines=0, documents=0, tokens=0, text_bytes=0)
        self._refused: Counter[str] = Counter()
        self._examples: list[RefusedLine] = []
        self._max_token_id = -1

    def add(self, block: EncodedBlock) -> None:
        """Write the documents of the file's next block, and count the refused lines in the block."""
        lines_before = self._counts["lines"]
        if len(block.lengths):
            self._streams["tokens"].write(block.tokens)
            self._max_token_id = max(self._max_token_id, int(block.tokens.max()))
        lines = [lines_before + number + 1 for number in block.numbers]
        columns: list[Any] = [block.ids, block.sources, lines, block.lengths]  # in the order of the schema
        if block.mask is not None:
            self._streams["mask"].write(block.mask)
            outcomes = [ledger.CUT if is_cut else ledger.WHOLE for is_cut in block.is_cut]
            rows: list[Any] = list(zip(*columns, block.learned, outcomes, strict=True))
            # In files of conversations, a refused line has a row, too: without id and source, of length 0.
            rows += [(None, None, lines_before + number + 1, 0, 0, reason) for number, reason in block.refusals]
            columns = list(zip(*sorted(rows, key=itemgetter(2)), strict=True))  # columns of the rows sorted by line
        if columns and len(columns[0]):  # otherwise the block has no row
            arrays = list(map(pyarrow.array, columns, self._schema.types))
            self._rows.write_batch(pyarrow.record_batch(arrays, schema=self._schema))
        self._refused.update(reason for _, reason in block.refusals)
        for number, reason in block.refusals[: REFUSED_EXAMPLES - len(self._examples)]:
            line = lines_before + number + 1
            self._examples.append(RefusedLine(file=recorded_path(self._input_path), line=line, reason=reason))
        self._counts.update(
            lines=block.lines, documents=len(block.lengths), tokens=len(block.tokens), text_bytes=block.text_bytes
        )

    def finish(self, input_bytes: int, sha256: str) -> EncodedRecord:
        """Close the files and write the record, which marks the input file as completely encoded."""
        self._rows.close()
        for stream in self._streams.values():
            stream.close()
        record = EncodedRecord(
            input=InputRecord(
                path=recorded_path(self._input_path), bytes=input_bytes, sha256=sha256, modified_ns=self._modified_ns
            ),
            **self._counts,
            max_token_id=self._max_token_id,
            refused=dict(sorted(self._refused.items())),
            refused_examples=self._examples,
            sizes={suffix: self._encoded.path(suffix).stat().st_size for suffix in self._streams},
        )
        write_atomically(self._encoded.path("json"), msgspec.json.encode(record))
        return record


# -- the folder


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs and settings of a preparation, recorded in its work folder."""

    inputs: list[str]
    settings: Settings
    tokenizer: TokenizerRecord
    encoding: Encoding

    def difference(self, other: "Assignment") -> str | None:
        """Name the first difference of two assignments, or return None. The library that computes ids may differ."""
        return difference_of(self, other) or (None if self.inputs == other.inputs else "other inputs")


def difference_of(ours: Assignment | Manifest, theirs: Assignment | Manifest) -> str | None:
    """Name the first setting that differs, or return None. The tokenizer and its end of text count as settings."""
    our_values, their_values = (
        asdict(side.settings) | {"tokenizer": side.tokenizer.sha256, "eod_id": side.tokenizer.eod_id}
        for side in (ours, theirs)
    )
    for name, value in our_values.items():
        if value != their_values[name]:
            return f"other settings ({name})"
    return None


class WorkFolder:
    """The folder of one prefix; created, locked and released by `work_folder`."""

    def __init__(self, prefix: str) -> None:
        self.path = folder_path(prefix)
        self._assignment_file = self.path / "assignment.json"

    def read_assignment(self) -> Assignment | None:
        """Read the assignment; None in a new folder."""
        with suppress(FileNotFoundError):
            return msgspec.json.decode(self._assignment_file.read_bytes(), type=Assignment)
        return None

    def write_assignment(self, assignment: Assignment) -> None:
        """Record the preparation that the folder belongs to."""
        write_atomically(self._assignment_file, msgspec.json.encode(assignment), aside=self.path)

    def clear(self) -> None:
        """Remove everything but the lock; `work_folder` removes the empty folder when it releases the lock."""
        for path in self.path.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    @property
    def has_encoded_inputs(self) -> bool:
        """Return whether any input file is completely encoded."""
        return any(self.path.glob("[0-9]*.json"))


def folder_path(prefix: str) -> Path:
    """Return the path of a prefix's work folder, which need not exist."""
    return Path(prefix + ".parts")


@contextmanager
def work_folder(prefix: str) -> Iterator[WorkFolder]:
    """Create and lock the work folder of a prefix; at the end, remove it unless it holds encoded inputs.

    Raises InUseError if another process holds the lock.
    """
    work = WorkFolder(prefix)
    work.path.mkdir(parents=True, exist_ok=True)
    lock = take_lock(work.path / LOCK, wait=False)
    if lock is None:
        raise InUseError(f"{prefix} is being written by another process; wait for it, or choose another prefix")
    try:
        yield work
    finally:
        if not work.has_encoded_inputs:
            shutil.rmtree(work.path, ignore_errors=True)
        os.close(lock)
        with suppress(OSError):  # a network file system keeps an open file under another name until it is closed
            work.path.rmdir()
