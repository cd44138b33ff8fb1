"""The token files of a preparation, assembled from encoded inputs in the order of the input files.

Files are written in the work folder and renamed at the end, the manifest last. Everything is streamed: even the index
of a billion documents is written from a file of their lengths.
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
from megatron_fanformer.data.manifest import MANIFEST_SUFFIX, FileRecord, Format, Settings, TokenFiles
from megatron_fanformer.data.token_files import DTYPES, INDEX_HEADER, INDEX_MAGIC, INDEX_VERSION
from megatron_fanformer.durable_files import NO_SPACE, naming, sha256_of, sync
from megatron_fanformer.errors import FanformerError, InputError
from megatron_fanformer.prepare.encoded_inputs import EncodedInput, EncodedRecord, WorkFolder
from megatron_fanformer.stores import is_url

TOKEN_SUFFIXES: dict[Format, str] = {"megatron": ".bin", "npy": ".npy"}
CHAT_SUFFIXES: dict[Format, tuple[str, str]] = {"megatron": (".bin", MASK_SUFFIX), "npy": (IDS_NPY, MASK_NPY)}
"""Suffixes of the tokens and of the mask of conversations."""
ALL_SUFFIXES = (".bin", ".npy", ".idx", MASK_SUFFIX, IDS_NPY, MASK_NPY, LEDGER_SUFFIX, MANIFEST_SUFFIX)
"""All suffixes that files of an output may have; the manifest's comes last."""
INDEX_CHUNK = 1 << 20


class Assembler:
    """Writes the token files of one prefix, from one encoded input after the other.

    The row of a refused conversation has length 0: it is in the ledger, but has no tokens.
    """

    def __init__(self, prefix: str, settings: Settings, work: WorkFolder) -> None:
        self._path, self._settings, self._work = Path(prefix), settings, work
        self._dtype = np.dtype(settings.dtype)
        is_chats = settings.chat is not None
        suffixes: tuple[str, ...] = CHAT_SUFFIXES[settings.format] if is_chats else (TOKEN_SUFFIXES[settings.format],)
        self._streams = {suffix: _HashedFile(self._partial(suffix)) for suffix in suffixes}
        self._tokens = self._streams[suffixes[0]]
        self._mask = self._streams[suffixes[1]] if is_chats else None
        self._lengths = self._partial(".lengths").open("wb")
        self._ledger = LedgerWriter(self._partial(LEDGER_SUFFIX), is_chats=is_chats)
        self._documents = self._learned_tokens = self._cut = 0
        self._max_token_id = -1
        self.next_input = 0
        """The number of the input file to append next."""

    def append(self, encoded: EncodedInput, record: EncodedRecord) -> None:
        """Append the encoded input number `next_input`."""
        with ExitStack() as files:
            tokens = files.enter_context(encoded.path("tokens").open("rb"))
            mask = None if self._mask is None else files.enter_context(encoded.path("mask").open("rb"))
            for rows in encoded.batches():
                self._ledger.add(rows, record.input.path, first_token=self._tokens.bytes // self._dtype.itemsize)
                lengths = rows.column("length").to_numpy()
                num_tokens = int(lengths.sum(dtype=np.int64))
                if self._mask is not None and mask is not None:
                    self._mask.write(_read(mask, num_tokens))
                    self._learned_tokens += int(rows.column("learned").to_numpy().sum(dtype=np.int64))
                    self._cut += rows.column("outcome").to_pylist().count(CUT)
                    lengths = lengths[lengths > 0]  # without refused conversations
                self._tokens.write(_read(tokens, num_tokens * self._dtype.itemsize))
                self._lengths.write(lengths.tobytes())
                self._documents += len(lengths)
        self._max_token_id = max(self._max_token_id, record.max_token_id)
        self.next_input += 1

    def publish(self) -> TokenFiles:
        """Write the index and all remaining data to the disk, rename the files, and return their record."""
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
        """Close the files. If they were not published, the next run writes them again from the encoded inputs."""
        with suppress(OSError):  # buffered data may not fit on the disk
            self._lengths.close()
        for stream in self._streams.values():
            stream.abandon()
        self._ledger.abandon()

    def _partial(self, suffix: str) -> Path:
        """Return the path of an unfinished output file; a slash in a suffix becomes a dot, so no folder is needed."""
        return self._work.path / (self._path.name + suffix.replace("/", "."))


class _HashedFile:
    """A file that is hashed while it is written; a thread computes the SHA-256, which takes longer than writing."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("wb")
        self._digest, self._thread = hashlib.sha256(), ThreadPoolExecutor(1)
        self._hashed: Future[None] | None = None
        self.bytes = 0

    def write(self, data: bytes) -> None:
        if self._hashed is not None:
            self._hashed.result()  # wait, so that at most one piece stays in memory
        self._hashed = self._thread.submit(self._digest.update, data)
        self.bytes += len(data)
        self._file.write(data)

    def finish(self) -> str:
        """Flush the file to the disk, close it, and return its hexadecimal SHA-256."""
        self._thread.shutdown()
        with naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return self._digest.hexdigest()

    def abandon(self) -> None:
        """Close the file as it is."""
        self._thread.shutdown()
        with suppress(OSError):
            self._file.close()


def _index(lengths: Path, documents: int, dtype: np.dtype[Any]) -> Iterator[bytes]:
    """Yield the bytes of a Megatron index in which every document is one sequence.

    `data/token_files.py` describes the format. megatron-core's own writer would hold a Python number for each document.

    Args:
        lengths: a file of the documents' lengths in tokens, int32.
    """
    dtype_code = next(code for code, known in DTYPES.items() if known == dtype)
    yield INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, dtype_code, documents, documents + 1)
    with lengths.open("rb") as file:
        while data := file.read(4 * INDEX_CHUNK):
            yield data  # the length of each sequence
        file.seek(0)
        offset = 0
        while data := file.read(4 * INDEX_CHUNK):
            ends = offset + np.cumsum(np.frombuffer(data, np.int32), dtype=np.int64) * dtype.itemsize
            yield np.concatenate([[offset], ends[:-1]]).astype(np.int64).tobytes()  # the byte where each begins
            offset = int(ends[-1])
    for start in range(0, documents + 1, INDEX_CHUNK):  # the first sequence of each document, and their number
        yield np.arange(start, min(start + INDEX_CHUNK, documents + 1), dtype=np.int64).tobytes()


@contextmanager
def writing_to(prefix: str) -> Iterator[None]:
    """Turn OSError into an error for the user: InputError if another prefix helps, otherwise FanformerError."""
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
    """Raise InputError if the output is a URL or a folder: for `web/`, token files would lie beside the folder."""
    if is_url(output):
        raise InputError(
            f"output {output} is on another store; name a path, and copy the files of that prefix, the manifest last"
        )
    if output.rpartition("/")[2] in ("", ".", ".."):
        raise InputError(f"output {output} names a folder; name a prefix in it, such as {os.path.join(output, 'web')}")


def refuse_existing_files(prefix: str) -> None:
    """Raise InputError if a file exists under any name that an output of this prefix may have."""
    for suffix in ALL_SUFFIXES:
        if os.path.lexists(prefix + suffix):
            raise InputError(
                f"{prefix}{suffix} exists, and there is no manifest of a complete preparation; choose another output"
                f" prefix, or remove the files of {prefix}"
            )
