"""One input file's share of a preparation: encoded on its own, and kept until it has gone into the output.

A shard is three files in the work folder: `NNNNNN.tokens`, `NNNNNN.documents` (an Arrow stream with one row per
document) and, written last, `NNNNNN.json`, the record that completes it. So an interrupted preparation continues
with the shards that it has. A shard of conversations has `NNNNNN.mask` as well, a byte for each token, and a row also
for each line that is refused.

PREFIX.parts/, the work folder, also holds the assignment (inputs and settings), and the unfinished output files.
One process at a time holds its lock. When the preparation is complete, it is removed.
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
import numpy as np
from msgspec.structs import asdict

from megatron_fanformer.data import ledger
from megatron_fanformer.data.manifest import Encoding, InputRecord, Manifest, RefusedLine, Settings, TokenizerRecord
from megatron_fanformer.durable_files import take_lock, write_atomically
from megatron_fanformer.errors import InUseError
from megatron_fanformer.prepare.encoding import EncodedBlock
from megatron_fanformer.prepare.inputs import InputFile, input_sha256, recorded_path

REFUSED_EXAMPLES = 10
LOCK = "lock"


class ShardRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of a shard: lines == documents + the sum of refused."""

    input: InputRecord
    lines: int
    documents: int
    tokens: int
    text_bytes: int
    max_token_id: int
    """The largest token id; -1 where there is no document."""
    refused: dict[str, int]
    refused_examples: list[RefusedLine]
    sizes: dict[str, int]
    """Bytes of each file, by suffix."""


@dataclass(frozen=True)
class ShardFiles:
    """The files of one input's shard."""

    folder: Path
    number: int

    def path(self, suffix: str) -> Path:
        """Return the file of one suffix: tokens, documents, mask or json."""
        return self.folder / f"{self.number:06d}.{suffix}"

    def batches(self) -> Iterator[Any]:
        """Yield the rows of its documents, as Arrow record batches with columns id, source, line and length.

        Conversations also have the columns learned and outcome, and rows of length 0 for refused ones.
        """
        import pyarrow

        with self.path("documents").open("rb") as file, pyarrow.ipc.open_stream(file) as reader:
            yield from reader


def finished_shard(shard: ShardFiles, file: InputFile) -> ShardRecord | None:
    """Return the record of a file's shard if all its files have their sizes, and the file is unchanged; else None."""
    with suppress(FileNotFoundError, msgspec.MsgspecError):  # there is none, or it is an earlier version's
        record = msgspec.json.decode(shard.path("json").read_bytes(), type=ShardRecord)
        sizes = {suffix: shard.path(suffix).stat().st_size for suffix in record.sizes}
        if sizes == record.sizes and is_unchanged(file, record.input):
            return record
    return None


def is_unchanged(file: InputFile, record: InputRecord) -> bool:
    """Return whether an input has the recorded content; it is read if its path or modification time has changed."""
    status = file.stat()
    is_same = recorded_path(file) == record.path and status.st_mtime_ns == record.modified_ns
    return status.st_size == record.bytes and (is_same or input_sha256(file) == record.sha256)


class ShardWriter:
    """Write one shard; only `finish` completes it."""

    def __init__(self, files: ShardFiles, input_path: InputFile, *, is_chats: bool = False) -> None:
        import pyarrow

        self._files = files
        self._input_path = input_path
        self._modified_ns = input_path.stat().st_mtime_ns
        columns = ledger.schema(is_chats=is_chats)
        self._schema = pyarrow.schema([column for column in columns if column.name not in ("shard", "first_token")])
        self._streams: dict[str, Any] = {}
        for suffix in ("tokens", "documents", *(["mask"] if is_chats else [])):
            # A new file: a worker that outlives its killed parent for a moment may still write to the old one.
            files.path(suffix).unlink(missing_ok=True)
            self._streams[suffix] = files.path(suffix).open("wb")
        self._rows = pyarrow.ipc.new_stream(self._streams["documents"], self._schema)
        self._counts: Counter[str] = Counter(lines=0, documents=0, tokens=0, text_bytes=0)
        self._refused: Counter[str] = Counter()
        self._examples: list[RefusedLine] = []
        self._max_token_id = -1

    def add(self, block: EncodedBlock) -> None:
        """Add the documents of the file's next block, and count its refused lines."""
        import pyarrow

        lines_before = self._counts["lines"]
        if len(block.lengths):
            self._streams["tokens"].write(block.tokens)
            self._max_token_id = max(self._max_token_id, int(block.tokens.max()))
        columns: list[Any] = [block.numbers, block.ids, block.sources, block.lengths]
        if block.mask is not None:  # conversations: a row with the outcome of every line
            self._streams["mask"].write(block.mask)
            outcomes = [ledger.CUT if is_cut else ledger.WHOLE for is_cut in block.is_cut]
            rows = [*zip(*columns, block.learned, outcomes, strict=True)]
            rows += [(number, None, None, 0, 0, reason) for number, reason in block.refusals]
            columns = [*zip(*sorted(rows, key=itemgetter(0)), strict=True)]
        if columns and len(columns[0]):
            numbers, ids, sources, *others = columns
            columns = [ids, sources, np.array(numbers) + (lines_before + 1), *others]
            arrays = [pyarrow.array(column, kind) for column, kind in zip(columns, self._schema.types, strict=True)]
            self._rows.write_batch(pyarrow.record_batch(arrays, schema=self._schema))
        self._refused.update(reason for _, reason in block.refusals)
        for number, reason in block.refusals[: REFUSED_EXAMPLES - len(self._examples)]:
            line = lines_before + number + 1
            self._examples.append(RefusedLine(file=recorded_path(self._input_path), line=line, reason=reason))
        self._counts.update(
            lines=block.lines, documents=len(block.lengths), tokens=len(block.tokens), text_bytes=block.text_bytes
        )

    def finish(self, input_bytes: int, sha256: str) -> ShardRecord:
        """Write the record, last; until then there is no shard."""
        self._rows.close()
        for stream in self._streams.values():
            stream.close()
        record = ShardRecord(
            input=InputRecord(
                path=recorded_path(self._input_path), bytes=input_bytes, sha256=sha256, modified_ns=self._modified_ns
            ),
            **self._counts,
            max_token_id=self._max_token_id,
            refused=dict(sorted(self._refused.items())),
            refused_examples=self._examples,
            sizes={suffix: self._files.path(suffix).stat().st_size for suffix in self._streams},
        )
        write_atomically(self._files.path("json"), msgspec.json.encode(record))
        return record


# -- the folder


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs and settings of a preparation; a folder with others belongs to another one."""

    inputs: list[str]
    settings: Settings
    tokenizer: TokenizerRecord
    encoding: Encoding

    def difference(self, other: "Assignment") -> str | None:
        """Describe the first difference of `other`; the library that computes the ids makes none."""
        return difference_of(self, other) or (None if self.inputs == other.inputs else "other inputs")


def difference_of(ours: Assignment | Manifest, theirs: Assignment | Manifest) -> str | None:
    """Name the first setting that differs, the tokenizer's content and end of text among them; None if nothing does."""
    mine, other = (
        asdict(one.settings) | {"tokenizer": one.tokenizer.sha256, "eod_id": one.tokenizer.eod_id}
        for one in (ours, theirs)
    )
    name = next((name for name in mine if mine[name] != other[name]), None)
    return name and f"other settings ({name})"


class WorkFolder:
    """The folder of one prefix; created, locked and released by `work_folder`."""

    def __init__(self, prefix: str) -> None:
        self.path = folder_path(prefix)
        self._assignment_file = self.path / "assignment.json"

    def shard(self, number: int) -> ShardFiles:
        """Return the files of an input's shard."""
        return ShardFiles(self.path, number)

    def read_assignment(self) -> Assignment | None:
        """Read the assignment; None in a new folder."""
        with suppress(FileNotFoundError):
            return msgspec.json.decode(self._assignment_file.read_bytes(), type=Assignment)
        return None

    def write_assignment(self, assignment: Assignment) -> None:
        """Start: from here on the folder belongs to this preparation."""
        write_atomically(self._assignment_file, msgspec.json.encode(assignment), aside=self.path)

    def end(self) -> None:
        """Remove all but the lock: nothing is left to be continued, and the folder goes when it is released."""
        for path in self.path.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    @property
    def holds_shards(self) -> bool:
        """Return whether any input is done."""
        return any(self.path.glob("[0-9]*.json"))


def folder_path(prefix: str) -> Path:
    """Return the path of a prefix's work folder, which need not exist."""
    return Path(prefix + ".parts")


@contextmanager
def work_folder(prefix: str) -> Iterator[WorkFolder]:
    """Yield the locked work folder of a prefix, created if missing; it stays if shards are done and not yet published.

    Raises InUseError where another process holds it.
    """
    work = WorkFolder(prefix)
    work.path.mkdir(parents=True, exist_ok=True)
    lock = take_lock(work.path / LOCK, wait=False)
    if lock is None:
        raise InUseError(f"{prefix} is being written by another process; wait for it, or choose another prefix")
    try:
        yield work
    finally:
        if not work.holds_shards:
            shutil.rmtree(work.path, ignore_errors=True)
        os.close(lock)
        with suppress(OSError):  # a network file system keeps an open file under another name until it is closed
            work.path.rmdir()
