"""The token files of a preparation, assembled from shards in the order of the inputs.

Files are written in the work folder, and get their names together. Everything is streamed: the index of a billion
documents is written from a file of their lengths.
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
from megatron_fanformer.data.manifest import MANIFEST_SUFFIX, FileRecord, Format, Manifest, Settings, TokenFiles
from megatron_fanformer.data.token_files import DTYPES, INDEX_HEADER, INDEX_MAGIC
from megatron_fanformer.durable_files import NO_SPACE, naming, sha256_of, sync
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.prepare.shards import ShardFiles, ShardRecord, WorkFolder
from megatron_fanformer.stores import is_url

TOKEN_SUFFIXES: dict[Format, str] = {"megatron": ".bin", "npy": ".npy"}
CHAT_SUFFIXES: dict[Format, tuple[str, str]] = {"megatron": (".bin", MASK_SUFFIX), "npy": (IDS_NPY, MASK_NPY)}
"""Suffixes of the tokens and the mask of chats."""
STANDING_SUFFIXES = (".bin", ".npy", ".idx", MASK_SUFFIX, IDS_NPY, MASK_NPY, LEDGER_SUFFIX, MANIFEST_SUFFIX)
"""The ends of names that an output may have, the manifest's last."""
INDEX_CHUNK = 1 << 20


class Assembler:
    """The token files of one prefix, written in its work folder.

    A row of conversations has length 0 where the line was refused: it is in the ledger, and has no tokens.
    """

    def __init__(self, prefix: str, settings: Settings, work: WorkFolder) -> None:
        self._path, self._settings, self._work = Path(prefix), settings, work
        self._dtype = np.dtype(settings.dtype)
        is_chats = settings.chat is not None
        suffixes = CHAT_SUFFIXES[settings.format] if is_chats else (TOKEN_SUFFIXES[settings.format],)
        self._streams = {suffix: _HashedFile(self._partial(suffix)) for suffix in suffixes}
        self._tokens, *masks = self._streams.values()
        self._mask = masks[0] if masks else None
        self._lengths = self._partial(".lengths").open("wb")
        self._ledger = LedgerWriter(self._partial(LEDGER_SUFFIX), is_chats=is_chats)
        self._documents = self._learned_tokens = self._cut = 0
        self._max_token_id = -1
        self.next_input = 0
        """The input whose shard is to be appended next."""

    def append(self, shard: ShardFiles, record: ShardRecord) -> None:
        """Append the shard of the next input."""
        with ExitStack() as files:
            tokens = files.enter_context(shard.path("tokens").open("rb"))
            mask = None if self._mask is None else files.enter_context(shard.path("mask").open("rb"))
            for rows in shard.batches():
                self._ledger.add(rows, record.input.path, first_token=self._tokens.bytes // self._dtype.itemsize)
                lengths = rows.column("length").to_numpy()
                count = int(lengths.sum(dtype=np.int64))
                if self._mask is not None and mask is not None:
                    self._mask.write(_read(mask, count))
                    self._learned_tokens += int(rows.column("learned").to_numpy().sum(dtype=np.int64))
                    self._cut += rows.column("outcome").to_pylist().count(CUT)
                    lengths = lengths[lengths > 0]
                data = _read(tokens, count * self._dtype.itemsize)
                self._tokens.write(data)
                self._lengths.write(lengths.tobytes())
                self._documents += len(lengths)
                if data:
                    self._max_token_id = max(self._max_token_id, int(np.frombuffer(data, self._dtype).max()))
        self.next_input += 1

    def publish(self) -> TokenFiles:
        """Write what remains to the disk, and give all files their names; returns the record of the files."""
        self._lengths.close()
        if self._settings.format == "megatron":
            index = self._streams[".idx"] = _HashedFile(self._partial(".idx"))
            for data in _index(self._partial(".lengths"), self._documents, self._dtype):
                index.write(data)
        records = {
            suffix: FileRecord(path=self._path.name + suffix, sha256=stream.finish(), bytes=stream.bytes)
            for suffix, stream in self._streams.items()
        }
        ledger = self._partial(LEDGER_SUFFIX)
        self._ledger.finish()
        sync(ledger)
        records[LEDGER_SUFFIX] = FileRecord(
            path=self._path.name + LEDGER_SUFFIX, sha256=sha256_of(ledger), bytes=ledger.stat().st_size
        )
        output = TokenFiles(
            prefix=self._path.name,
            documents=self._documents,
            tokens=self._tokens.bytes // self._dtype.itemsize,
            max_token_id=self._max_token_id,
            files=records,
            learned_tokens=None if self._mask is None else self._learned_tokens,
            cut=None if self._mask is None else self._cut,
        )
        for suffix, record in output.files.items():
            path = self._path.parent / record.path
            path.parent.mkdir(exist_ok=True)
            self._partial(suffix).replace(path)
            sync(path.parent)
        return output

    def close(self) -> None:
        """Close files that were not published; the next run begins them again."""
        with suppress(OSError):  # of data that it still held
            self._lengths.close()
        for stream in self._streams.values():
            stream.abandon()
        self._ledger.abandon()

    def _partial(self, suffix: str) -> Path:
        return self._work.path / (self._path.name + suffix.replace("/", "."))  # files alone are in that folder


class _HashedFile:
    """A file and the SHA-256 of what is written to it, computed on a thread since it takes longer than writing."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("wb")
        self._digest = hashlib.sha256()
        self._thread = ThreadPoolExecutor(1)
        self._hashed: Future[None] | None = None
        self.bytes = 0

    def write(self, data: bytes) -> None:
        if self._hashed is not None:
            self._hashed.result()  # one piece at a time is held
        self._hashed = self._thread.submit(self._digest.update, data)
        self.bytes += len(data)
        self._file.write(data)

    def finish(self) -> str:
        """Flush it to the disk; returns the hexadecimal SHA-256."""
        self._thread.shutdown()
        with naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Close it as it is."""
        self._thread.shutdown()
        with suppress(OSError):
            self._file.close()


def _index(lengths: Path, documents: int, dtype: np.dtype[Any]) -> Iterator[bytes]:
    """Yield the bytes of a Megatron index in which every document is one sequence.

    `token_files` describes the format; megatron-core's own writer holds one Python number per document.
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
            f"writing {prefix} failed ({error.strerror or error}); {remedy}, and run the same command to continue"
        ) from error


def _read(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise FanformerError(f"{file.name} is truncated, another program wrote to it; start again")
    return data


def check_output(output: str) -> None:
    """Raise InputError for a URL, and for a folder in place of a prefix, beside which the files would lie."""
    if is_url(output):
        raise InputError(
            f"output {output} is on another store; name a path, and copy the files of that prefix, the manifest last"
        )
    if output.rpartition("/")[2] in ("", ".", ".."):
        prefix = os.path.join(output, "web")
        raise InputError(f"output {output} names a folder; name a prefix in it, such as {prefix}")


def is_whole(prefix: str, manifest: Manifest) -> bool:
    """Return whether all files of an output stand with their sizes."""
    files = {Path(prefix).parent / record.path: record.bytes for record in manifest.outputs[0].files.values()}
    return all(path.is_file() and path.stat().st_size == size for path, size in files.items())


def refuse_standing_files(prefix: str) -> None:
    """Raise InputError if there are files under the output names of a prefix."""
    for suffix in STANDING_SUFFIXES:
        if os.path.lexists(prefix + suffix):
            raise InputError(
                f"{prefix}{suffix} exists, and there is no manifest of a complete preparation; choose another output"
                f" prefix, or remove the files of {prefix}"
            )
