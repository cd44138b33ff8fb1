"""Appends the shards, in the order of the inputs, to the output: one prefix, or parts of a given size.

A part ends after the first document with which its tokens reach the size, wherever in a shard that is, so the
parts depend on the documents alone. All files are written in the work folder, and get their names together.
Everything is streamed: the index of a billion documents is written from a file of their lengths.
"""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron_fanformer.data.chats import IDS_NPY, MASK_NPY, MASK_SUFFIX
from megatron_fanformer.data.ledger import CUT, LEDGER_SUFFIX, LedgerWriter
from megatron_fanformer.data.manifest import (
    MANIFEST_SUFFIX,
    FileRecord,
    Format,
    PartManifest,
    Settings,
    TokenFiles,
    TokenizerRecord,
    encode_manifest,
    manifest_path,
)
from megatron_fanformer.data.token_files import DTYPES, INDEX_HEADER, INDEX_MAGIC
from megatron_fanformer.durable_files import NO_SPACE, naming, sync, write_refusal
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.prepare.shards import ShardFiles, ShardRecord, WorkFolder

TOKEN_SUFFIXES: dict[Format, str] = {"megatron": ".bin", "npy": ".npy"}
CHAT_SUFFIXES: dict[Format, tuple[str, str]] = {"megatron": (".bin", MASK_SUFFIX), "npy": (IDS_NPY, MASK_NPY)}
"""Suffixes of the tokens and the mask of chats."""
STANDING_SUFFIXES = (".bin", ".npy", ".idx", MASK_SUFFIX, IDS_NPY, MASK_NPY, LEDGER_SUFFIX, ".blend", MANIFEST_SUFFIX)
"""The ends of names that an output may have, the manifest's last."""
INDEX_CHUNK = 1 << 20


def part_prefix(prefix: str, part: int) -> str:
    """Return the prefix of one part of several."""
    return f"{prefix}-{part:05d}"


class Assembler:
    """The output of one preparation."""

    def __init__(self, prefix: str, settings: Settings, tokenizer: TokenizerRecord, work: WorkFolder) -> None:
        self._prefix, self._settings, self._tokenizer, self._work = prefix, settings, tokenizer, work
        self._itemsize = np.dtype(settings.dtype).itemsize
        self._writer: TokenWriter | None = None
        self._finished: list[tuple[TokenWriter, TokenFiles]] = []
        self._part_manifests: list[PartManifest] = []
        self._part_begins_in = 0
        self.next_input = 0
        """The input whose shard is to be appended next."""

    def append(self, shard: ShardFiles, record: ShardRecord) -> None:
        """Append the shard of the next input."""
        document = 0
        with ExitStack() as files:
            tokens = files.enter_context(shard.path("tokens").open("rb"))
            # Chats are not cut into parts; the rows of those that are refused have no tokens.
            mask = files.enter_context(shard.path("mask").open("rb")) if self._settings.chat is not None else None
            for rows in shard.batches():
                self._append_rows(tokens, mask, rows, record.input.path, document)
                document += rows.num_rows
        self.next_input += 1

    def publish(self) -> list[TokenFiles]:
        """Give all files their names, and parts their manifests; returns their records."""
        if self._writer is not None:
            self._finish_part(self.next_input, 0)
        for writer, output in self._finished:
            writer.publish(output, Path(self._prefix).parent)
        for part in self._part_manifests:
            self._work.publish(encode_manifest(part), manifest_path(part_prefix(self._prefix, part.part)))
        return [output for _, output in self._finished]

    def close(self) -> None:
        """Leave what is not finished; the next run begins it again."""
        if self._writer is not None:
            self._writer.abandon()

    def _append_rows(self, tokens: IO[bytes], mask: IO[bytes] | None, rows: Any, shard: str, document: int) -> None:
        """Append documents of one shard; `document` is the number of the first one in it."""
        while rows.num_rows:
            if self._writer is None:
                self._writer = TokenWriter(self._work.path, Path(self._next_prefix).name, self._settings)
            number, fills = self._fitting(rows, self._writer)
            piece, rows = rows.slice(0, number), rows.slice(number)
            size = int(piece.column("length").to_numpy().sum(dtype=np.int64)) * self._itemsize
            masked = b"" if mask is None else _read(mask, size // self._itemsize)
            self._writer.add(_read(tokens, size), piece, shard, masked)
            document += number
            if fills:
                self._finish_part(self.next_input, document)

    def _fitting(self, rows: Any, writer: "TokenWriter") -> tuple[int, bool]:
        """Return how many of the documents go into the current part, and whether they fill it."""
        if self._settings.part_bytes is None:
            return rows.num_rows, False
        ends = np.cumsum(rows.column("length").to_numpy(), dtype=np.int64) * self._itemsize
        number = int(np.searchsorted(ends, self._settings.part_bytes - writer.token_bytes))
        return (number + 1, True) if number < len(ends) else (number, False)

    @property
    def _next_prefix(self) -> str:
        return self._prefix if self._settings.part_bytes is None else part_prefix(self._prefix, len(self._finished))

    def _finish_part(self, end_input: int, end_document: int) -> None:
        """Close the current part, which ends before a document of an input."""
        assert self._writer is not None
        writer, self._writer = self._writer, None
        output = writer.finish()
        if self._settings.part_bytes is not None:
            part = PartManifest(
                part=len(self._finished),
                whole=manifest_path(self._prefix).name,
                first_input=self._part_begins_in,
                end_input=end_input,
                end_document=end_document,
                settings=self._settings,
                tokenizer=self._tokenizer,
                output=output,
            )
            self._part_manifests.append(part)
        self._finished.append((writer, output))
        self._part_begins_in = end_input


class TokenWriter:
    """The files of one prefix, written in a work folder on the same disk."""

    def __init__(self, folder: Path, prefix: str, settings: Settings) -> None:
        self._folder, self._prefix, self._format = folder, prefix, settings.format
        self._dtype = np.dtype(settings.dtype)
        is_chats = settings.chat is not None
        suffixes = CHAT_SUFFIXES[self._format] if is_chats else (TOKEN_SUFFIXES[self._format],)
        self._streams = {suffix: _HashedFile(self._partial(suffix)) for suffix in suffixes}
        self._tokens, *masks = self._streams.values()
        self._mask = masks[0] if masks else None
        self._lengths = self._partial(".lengths").open("wb")
        ledger = _HashedFile(self._partial(LEDGER_SUFFIX)) if settings.ledger else None
        self._ledger = None if ledger is None else LedgerWriter(ledger, is_chats=is_chats)
        self._documents = self._learned_tokens = self._cut = 0
        self._max_token_id = -1

    @property
    def token_bytes(self) -> int:
        """Return the bytes of tokens so far."""
        return self._tokens.bytes

    def add(self, tokens: bytes, rows: Any, shard: str, mask: bytes = b"") -> None:
        """Add documents: their tokens, and their rows of `ShardFiles.batches`; `shard` is the input's path.

        For conversations `mask` has a byte per token, and a row of length 0 stands for a refused one.
        """
        lengths = rows.column("length").to_numpy()
        if self._ledger is not None:
            self._ledger.add(rows, shard, first_token=self.token_bytes // self._dtype.itemsize)
        if self._mask is not None:
            self._mask.write(mask)
            self._learned_tokens += int(rows.column("learned").to_numpy().sum(dtype=np.int64))
            self._cut += rows.column("outcome").to_pylist().count(CUT)
            lengths = lengths[lengths > 0]
        self._tokens.write(tokens)
        self._lengths.write(lengths.tobytes())
        self._documents += len(lengths)
        if tokens:
            self._max_token_id = max(self._max_token_id, int(np.frombuffer(tokens, self._dtype).max()))

    def finish(self) -> TokenFiles:
        """Write what remains to the disk; returns the record of the files."""
        self._lengths.close()
        if self._format == "megatron":
            index = self._streams[".idx"] = _HashedFile(self._partial(".idx"))
            for data in _index(self._partial(".lengths"), self._documents, self._dtype):
                index.write(data)
        if self._ledger is not None:
            self._ledger.finish()
            self._streams[LEDGER_SUFFIX] = self._ledger.file
        return TokenFiles(
            prefix=self._prefix,
            documents=self._documents,
            tokens=self.token_bytes // self._dtype.itemsize,
            max_token_id=self._max_token_id,
            files={
                suffix: FileRecord(path=self._prefix + suffix, sha256=stream.finish(), bytes=stream.bytes)
                for suffix, stream in self._streams.items()
            },
            learned_tokens=None if self._mask is None else self._learned_tokens,
            cut=None if self._mask is None else self._cut,
        )

    def abandon(self) -> None:
        """Close files that will not be finished.

        pyarrow's writer, if the collector found it open, would write the end of a ledger: at any moment of this
        process's next work, which may hold the very lock that a hash takes.
        """
        with suppress(OSError):  # of what it still held
            self._lengths.close()
        for stream in self._streams.values():
            stream.abandon()
        if self._ledger is not None:
            self._ledger.file.abandon()
            self._ledger.abandon()

    def publish(self, files: TokenFiles, folder: Path) -> None:
        """Give the finished files their names in `folder`."""
        for suffix, record in files.files.items():
            path = folder / record.path
            path.parent.mkdir(exist_ok=True)
            self._partial(suffix).replace(path)
            sync(path.parent)

    def _partial(self, suffix: str) -> Path:
        return self._folder / (self._prefix + suffix.replace("/", "."))  # files alone are in that folder


class _HashedFile:
    """A file and the SHA-256 of what is written to it, computed on a thread since it takes longer than writing."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("wb")
        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)
        self._hashed: Future[None] | None = None
        self.bytes = 0

    def write(self, data: Any) -> int:
        if self._file.closed:  # by `abandon`
            return len(data)
        data = bytes(data)  # a copy if the buffer is the caller's, which may change once this returns
        if self._hashed is not None:
            self._hashed.result()  # one piece at a time is held
        self._hashed = self._thread.submit(self._digest.update, data)
        self.bytes += len(data)
        return self._file.write(data)

    def finish(self) -> str:
        """Flush it to the disk; returns the hexadecimal SHA-256."""
        self._thread.shutdown()
        with naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Take no more: what is written from now on is dropped."""
        self._thread.shutdown()
        with suppress(OSError):
            self._file.close()

    # What pyarrow needs from a file besides `write`.
    closed = False

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        pass


def _index(lengths: Path, documents: int, dtype: np.dtype[Any]) -> Iterator[bytes]:
    """Yield the bytes of a Megatron index in which every document is one sequence.

    The format is described in `token_files`; megatron-core's own writer holds one Python number per document.
    """
    code = next(code for code, known in DTYPES.items() if known == dtype)
    yield INDEX_HEADER.pack(INDEX_MAGIC, 1, code, documents, documents + 1)
    with lengths.open("rb") as file:
        while data := file.read(4 * INDEX_CHUNK):
            yield data
        file.seek(0)
        offset = 0
        while data := file.read(4 * INDEX_CHUNK):
            ends = offset + np.cumsum(np.frombuffer(data, np.int32), dtype=np.int64) * dtype.itemsize
            yield np.concatenate([[offset], ends[:-1]]).astype(np.int64).tobytes()
            offset = int(ends[-1])
    for start in range(0, documents + 1, INDEX_CHUNK):
        yield np.arange(start, min(start + INDEX_CHUNK, documents + 1), dtype=np.int64).tobytes()


@contextmanager
def writing_to(prefix: str) -> Iterator[None]:
    """Turn the system's errors on writing into errors that name the path."""
    try:
        yield
    except (PermissionError, NotADirectoryError, FileExistsError, IsADirectoryError) as error:
        path = error.filename or prefix
        raise InputError(f"{path} cannot be written ({error.strerror}); choose another output prefix") from error
    except OSError as error:
        remedy = "free space" if error.errno in NO_SPACE else "repair the disk"
        raise FanformerError(
            f"writing {prefix} failed ({write_refusal(error, prefix)}); {remedy}, and run the same command to continue"
        ) from error


def _read(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise FanformerError(f"{file.name} is truncated, another program wrote to it; start again")
    return data
