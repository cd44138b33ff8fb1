"""Writes the files of one prefix: tokens, their index, the mask of chats, the ledger.

They get their names when they are complete.

Everything is streamed: the index of a billion documents is written from a file of their lengths.
"""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.data.chat_files import IDS_NPY, MASK_NPY, MASK_SUFFIX
from megatron_fanformer.data.ledger import CUT, LEDGER_SUFFIX, LedgerWriter
from megatron_fanformer.data.manifest import MANIFEST_SUFFIX, FileRecord, Format, Settings, TokenFiles
from megatron_fanformer.data.token_files import DTYPES, INDEX_HEADER, INDEX_MAGIC
from megatron_fanformer.durable_files import NO_SPACE, naming, sync, write_refusal
from megatron_fanformer.errors import FanformerError, InputError

TOKEN_SUFFIXES: dict[Format, str] = {"megatron": ".bin", "npy": ".npy"}
# Of chats: tokens and mask.
CHAT_SUFFIXES: dict[Format, tuple[str, str]] = {"megatron": (".bin", MASK_SUFFIX), "npy": (IDS_NPY, MASK_NPY)}
SUFFIXES = (*TOKEN_SUFFIXES.values(), ".idx", MASK_SUFFIX, IDS_NPY, MASK_NPY, LEDGER_SUFFIX)
INDEX_CHUNK = 1 << 20


def standing_suffixes() -> tuple[str, ...]:
    """Return the ends of names that an output may have, the manifest's last."""
    return (*SUFFIXES, ".blend", MANIFEST_SUFFIX)


def part_prefix(prefix: str, part: int) -> str:
    """Return the prefix of one part of several."""
    return f"{prefix}-{part:05d}"


class TokenWriter:
    """The files of one prefix, written in a work folder on the same disk."""

    def __init__(self, folder: Path, prefix: str, settings: Settings) -> None:
        self._prefix = prefix
        self._folder = folder
        self._format = settings.format
        self._dtype = np.dtype(settings.dtype)
        is_chats = settings.chat is not None
        self._suffix, self._mask_suffix = (
            CHAT_SUFFIXES[self._format] if is_chats else (TOKEN_SUFFIXES[self._format], "")
        )
        self._tokens = _HashedFile(self._partial(self._suffix))
        self._mask = _HashedFile(self._partial(self._mask_suffix)) if is_chats else None
        self._lengths = self._partial(".lengths").open("wb")
        ledger = _HashedFile(self._partial(LEDGER_SUFFIX)) if settings.ledger else None
        self._ledger = None if ledger is None else LedgerWriter(ledger, is_chats=is_chats)
        self._documents = 0
        self._learned_tokens = 0
        self._cut = 0
        self._max_token_id = -1

    @property
    def token_bytes(self) -> int:
        """Bytes of tokens so far."""
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
        digests = {self._suffix: self._tokens.finish()}
        if self._mask is not None:
            digests[self._mask_suffix] = self._mask.finish()
        if self._format == "megatron":
            index = _HashedFile(self._partial(".idx"))
            for data in _index(self._partial(".lengths"), self._documents, self._dtype):
                index.write(data)
            digests[".idx"] = index.finish()
        if self._ledger is not None:
            self._ledger.finish()
            digests[LEDGER_SUFFIX] = self._ledger.file.finish()
        return TokenFiles(
            prefix=self._prefix,
            documents=self._documents,
            tokens=self.token_bytes // self._dtype.itemsize,
            max_token_id=self._max_token_id,
            files={
                suffix: FileRecord(
                    path=self._prefix + suffix, bytes=self._partial(suffix).stat().st_size, sha256=digest
                )
                for suffix, digest in digests.items()
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
        for file in (self._tokens, self._mask):
            if file is not None:
                file.abandon()
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
