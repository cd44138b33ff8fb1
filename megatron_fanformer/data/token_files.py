"""Megatron's token files: `PREFIX.bin` holds the tokens, `PREFIX.idx` the documents' lengths.

The index is a header of 34 bytes (magic, version, dtype code, sequence count, document count), then the
lengths (int32), the byte offsets (int64) and the document bounds (int64) of the sequences. Here every
document is one sequence.
"""

import fcntl
import hashlib
import os
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron_fanformer.data.manifest import (
    FileRecord,
    Manifest,
    Outputs,
    encode_manifest,
    manifest_path,
    read_manifest,
    sha256_of,
)
from megatron_fanformer.errors import CorruptError, FanformerError, InputError

INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")
# The two that megatron-core's DType writes for token ids, by their code in the header.
DTYPES: dict[int, np.dtype[Any]] = {4: np.dtype(np.int32), 8: np.dtype(np.uint16)}
# From here on megatron-core's DType.optimal_dtype takes int32.
UINT16_VOCABULARY = 65_500
SCAN_TOKENS = 1 << 24


def bin_path(prefix: str) -> Path:
    """Where the tokens of a prefix stand."""
    return Path(prefix + ".bin")


def idx_path(prefix: str) -> Path:
    """Where the index of a prefix stands."""
    return Path(prefix + ".idx")


def token_dtype(vocab_size: int) -> str:
    """The token type for a vocabulary, by megatron-core's rule."""
    return "uint16" if vocab_size < UINT16_VOCABULARY else "int32"


@dataclass(frozen=True)
class TokenIndex:
    """What an index file says."""

    dtype: np.dtype[Any]
    lengths: np.ndarray
    """[sequences] int32, tokens of each sequence; mapped, not read."""
    tokens: int


def read_index(prefix: str) -> TokenIndex:
    """Read the index of a prefix and hold the .bin file's size against it.

    Raises InputError for missing files, CorruptError for an index of another format or files that disagree.
    """
    for path in (bin_path(prefix), idx_path(prefix)):
        if not path.is_file():
            raise InputError(f"{path} does not exist: give the prefix of a .bin and .idx pair")
    dtype, lengths, bin_bytes = _parse_index(idx_path(prefix))
    actual = bin_path(prefix).stat().st_size
    if actual != bin_bytes:
        raise CorruptError(
            f"{bin_path(prefix)} holds {actual} bytes where its index speaks of {bin_bytes}:"
            " one of the two is truncated or not of this pair; copy or prepare it again"
        )
    return TokenIndex(dtype, lengths, bin_bytes // dtype.itemsize)


def _parse_index(path: Path) -> tuple[np.dtype[Any], np.ndarray, int]:
    """Token type, lengths, and the bytes of tokens that the index speaks of."""
    size = path.stat().st_size
    header = path.open("rb").read(INDEX_HEADER.size)
    if len(header) < INDEX_HEADER.size:
        raise CorruptError(f"{path} is truncated ({size} bytes): copy or prepare it again")
    magic, version, code, count, documents = INDEX_HEADER.unpack(header)
    if magic != INDEX_MAGIC or version != 1 or code not in DTYPES:
        raise CorruptError(f"{path} is no Megatron index of int32 or uint16 token ids: prepare it again")
    if size < INDEX_HEADER.size + 12 * count + 8 * documents:
        raise CorruptError(f"{path} is truncated ({size} bytes for {count} sequences): copy or prepare it again")
    data = np.memmap(path, mode="r", dtype=np.uint8, offset=INDEX_HEADER.size, shape=(size - INDEX_HEADER.size,))
    lengths = data[: 4 * count].view(np.int32)
    offsets = data[4 * count : 12 * count].view(np.int64)
    bin_bytes = int(offsets[-1]) + int(lengths[-1]) * DTYPES[code].itemsize if count else 0
    return DTYPES[code], lengths, bin_bytes


def check_token_ids(prefixes: list[str], vocab_size: int) -> None:
    """Raise InputError for a prefix that holds an id outside [0, vocab_size).

    The manifest's word is taken where it speaks of this .bin file's size; otherwise all tokens are read.
    """
    for prefix in prefixes:
        smallest, largest = _token_id_bounds(prefix)
        wrong = smallest if smallest < 0 else largest
        if not 0 <= wrong < vocab_size:
            raise InputError(
                f"{prefix} holds token id {wrong}, outside the vocabulary of {vocab_size}:"
                " train with the tokenizer that made the tokens, or raise model.vocab_size"
            )


def _token_id_bounds(prefix: str) -> tuple[int, int]:
    index = read_index(prefix)
    manifest = read_manifest(prefix)
    if manifest is not None and manifest.outputs.bin.bytes == bin_path(prefix).stat().st_size:
        return 0, manifest.max_token_id
    if not index.tokens:
        return 0, 0
    tokens = np.memmap(bin_path(prefix), mode="r", dtype=index.dtype)
    smallest, largest = 0, 0
    for start in range(0, len(tokens), SCAN_TOKENS):
        block = tokens[start : start + SCAN_TOKENS]
        smallest, largest = min(smallest, int(block.min())), max(largest, int(block.max()))
    return smallest, largest


class TokenWriter:
    """Writes a prefix's files under temporary names; only `publish` gives them their own.

    Holds a lock on the temporary .bin, so that two preparations of one prefix cannot mix. Every method raises
    InputError or FanformerError where the system refuses to write.
    """

    def __init__(self, prefix: str, dtype: str) -> None:
        self._prefix = prefix
        self._dtype = np.dtype(dtype)
        self._lengths = array("i")
        self._digest = hashlib.sha256()
        self._final = (bin_path(prefix), idx_path(prefix), manifest_path(prefix))
        self._partial = tuple(path.with_name(path.name + ".partial") for path in self._final)
        self._made_folders: list[Path] = []
        with writing_to(prefix):
            parents = bin_path(prefix).absolute().parents
            self._made_folders = [folder for folder in parents if not folder.exists()]
            parents[0].mkdir(parents=True, exist_ok=True)
            self._bin = _open_locked(self._partial[0], prefix)

    def append(self, tokens: bytes, lengths: bytes) -> None:
        """Add documents: their tokens, and int32 lengths."""
        with writing_to(self._prefix):
            self._bin.write(tokens)
        self._digest.update(tokens)
        self._lengths.frombytes(lengths)

    def finish(self) -> Outputs:
        """Write the index, still under a temporary name; returns what both files hold."""
        partial_bin, partial_idx, _ = self._partial
        with writing_to(self._prefix):
            self._bin.flush()
            os.fsync(self._bin.fileno())
            self._write_index(partial_idx)
            return Outputs(
                bin=_record(self._final[0], partial_bin, self._digest.hexdigest()),
                idx=_record(self._final[1], partial_idx, sha256_of(partial_idx)),
            )

    def publish(self, manifest: Manifest) -> None:
        """Give the files their names: .bin, .idx, and last the manifest, which says that all is there."""
        with writing_to(self._prefix):
            self._partial[2].write_bytes(encode_manifest(manifest))
            for partial, final in zip(self._partial, self._final, strict=True):
                partial.replace(final)
        self._made_folders.clear()

    def close(self) -> None:
        """Remove whatever has not been published, and the folders made for it."""
        for partial in self._partial:
            partial.unlink(missing_ok=True)
        for folder in self._made_folders:
            with suppress(OSError):
                folder.rmdir()
        self._bin.close()

    def _write_index(self, path: Path) -> None:
        # Imported here because megatron-core costs seconds. This class is what its own IndexedDatasetBuilder
        # ends with; the builder itself would keep Python lists of an entry a document.
        from megatron.core.datasets.indexed_dataset import _IndexWriter

        lengths = np.frombuffer(self._lengths, np.int32)
        with _IndexWriter(str(path), self._dtype.type) as writer:
            writer.write(lengths, None, np.arange(len(lengths) + 1, dtype=np.int64))


def _record(final: Path, partial: Path, sha256: str) -> FileRecord:
    return FileRecord(path=final.name, bytes=partial.stat().st_size, sha256=sha256)


def _open_locked(partial: Path, prefix: str) -> IO[bytes]:
    """Open the temporary .bin, empty, as its only writer."""
    stream = os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=1 << 20)
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another process may have published, and so renamed, the very file that was opened here.
        ours = partial.exists() and os.path.samestat(os.fstat(stream.fileno()), partial.stat())
    except BlockingIOError:
        ours = False
    except OSError:  # a file system without locks
        ours = True
    if not ours or bin_path(prefix).exists() or idx_path(prefix).exists():
        stream.close()
        raise InputError(f"{prefix} is being written by another process: wait for it, or choose another prefix")
    stream.truncate(0)
    return stream


@contextmanager
def writing_to(prefix: str) -> Iterator[None]:
    """Turn the system's refusals to write into errors that name the path."""
    try:
        yield
    except (PermissionError, NotADirectoryError, FileExistsError, IsADirectoryError) as error:
        path = error.filename or prefix
        raise InputError(f"{path} cannot be written ({error.strerror}): choose another output prefix") from error
    except OSError as error:
        raise FanformerError(f"writing {prefix} failed ({error.strerror or error}): nothing was published") from error
