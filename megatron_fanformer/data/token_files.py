"""Megatron's token files: `PREFIX.bin` holds the tokens, `PREFIX.idx` the lengths of the sequences.

The index is a header of 34 bytes (magic, version, dtype code, sequence count, document count), then the lengths
(int32) and byte pointers (int64) of the sequences, and the document bounds (int64): the sequences at which documents
begin, and their number at the end. `prepare` makes every document one sequence; Megatron-LM's own tools may not.
"""

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.data.manifest import manifest_of
from megatron_fanformer.data.remote_files import RemoteFile, copy_to, find, folder_of, look_up, only_one_at_a_time
from megatron_fanformer.errors import CorruptError, InputError, redacted
from megatron_fanformer.stores import is_url, reported_as_local

BIN_SUFFIX = ".bin"
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")
INDEX_VERSION = 1
# The integers of megatron-core's DType by their code in the header; 6 and 7 are of floats, which no token ids are.
DTYPES = {code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}.items()}
# From this vocabulary size on megatron-core's DType.optimal_dtype picks int32.
UINT16_VOCABULARY = 65_500
CHECKED_ENTRIES = 1 << 20  # of an index at a time: some 30 MB of memory
UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
REMEDY = "copy both files of the pair again, or prepare them again"


def bin_path(prefix: str) -> Path:
    """Return the path of a prefix's tokens."""
    return Path(prefix + BIN_SUFFIX)


def idx_path(prefix: str) -> Path:
    """Return the path of a prefix's index."""
    return Path(prefix + ".idx")


def token_dtype(vocab_size: int) -> str:
    """Return the token type for a vocabulary, by megatron-core's rule."""
    return "uint16" if vocab_size < UINT16_VOCABULARY else "int32"


@dataclass(frozen=True)
class TokenIndex:
    """The index of a pair, with every entry checked; its arrays are mapped on first use."""

    prefix: str
    dtype: np.dtype[Any]
    """Type of the tokens."""
    sequences: int
    documents: int
    tokens: int
    identity: str
    """A fingerprint that changes when a length does: all that sample indices depend on."""
    part_tokens: dict[int, int]
    """The tokens of each requested part, by its number."""
    copy: str | None = None
    """Of a pair on another store, whose prefix is a URL: the prefix of the copy of its index on this machine."""
    remote: RemoteFile | None = None
    """The .bin file of such a pair."""

    @property
    def idx(self) -> Path:
        """Return the path of the index, or of its copy."""
        return idx_path(self.copy or self.prefix)

    @property
    def lengths(self) -> np.ndarray:
        """Return [sequences] int32, tokens of each sequence."""
        return _mapped(self.idx, np.int32, INDEX_HEADER.size, self.sequences)

    @property
    def pointers(self) -> np.ndarray:
        """Return [sequences] int64, the byte of the .bin file at which each sequence begins."""
        return _mapped(self.idx, np.int64, INDEX_HEADER.size + 4 * self.sequences, self.sequences)

    @property
    def bounds(self) -> np.ndarray:
        """Return [documents + 1] int64, the first sequence of each document, and the number of sequences."""
        return _mapped(self.idx, np.int64, INDEX_HEADER.size + (4 + 8) * self.sequences, self.documents + 1)


def _mapped(path: Path, dtype: type, first_byte: int, count: int) -> np.ndarray:
    return np.memmap(path, dtype, mode="r", offset=first_byte, shape=(count,)) if count else np.empty(0, dtype)


def read_index(
    prefix: str, parts: Mapping[int, tuple[float, float]] | None = None, *, cache: Path | None = None
) -> TokenIndex:
    """Read the index of a prefix, and check every entry of it against the others and the .bin file's size.

    The whole index is read once, in blocks; on the way, the tokens of `parts` are counted, by number, each between two
    fractions of the sequences, which are rounded as megatron-core does. Raises InputError for missing files, and
    CorruptError, which names the file and the field, for an index of another format, with wrong entries, or of another
    .bin file.

    Args:
        cache: the folder to which the index of a pair on another store is copied, once for each version of it.
    """
    if is_url(prefix):
        return _read_remote_index(prefix, parts, cache)
    for path in (bin_path(prefix), idx_path(prefix)):
        if not path.is_file():
            raise InputError(f"{path} does not exist; name the prefix of a .bin and .idx pair")
    return _read_checked(prefix, idx_path(prefix), bin_path(prefix).stat().st_size, parts)


def _read_remote_index(prefix: str, parts: Mapping[int, tuple[float, float]] | None, cache: Path | None) -> TokenIndex:
    """Copy the index of a pair on another store, and read it. megatron-core finds a .bin file of one byte beside it."""
    look_up([prefix + ".bin", prefix + ".idx"])
    tokens, index = find(prefix + ".bin"), find(prefix + ".idx")
    if tokens is None or index is None:
        path = redacted(prefix + (".bin" if tokens is None else ".idx"))
        raise InputError(f"{path} does not exist; name the prefix of a .bin and .idx pair, or a folder, ending in /")
    if cache is None:
        raise InputError(f"{redacted(prefix)} is on another store, and its index is copied; set data.cache_path")
    folder = folder_of(cache / "remote", index.identity)
    copy = str(folder / prefix.rpartition("/")[2])
    index_copy, stand_in = idx_path(copy), bin_path(copy)
    with only_one_at_a_time(folder):
        if index.version is None or not index_copy.is_file() or index_copy.stat().st_size != index.size:
            copy_to(index, index_copy)
        if not stand_in.is_file():
            with reported_as_local(folder):
                stand_in.write_bytes(b"0")  # not of the size that it has there: reading it must fail
    try:
        index_read = _read_checked(prefix, index_copy, tokens.size, parts)
    except CorruptError as error:
        index_copy.unlink(missing_ok=True)  # should only the copy be damaged
        raise CorruptError(str(error).replace(str(index_copy), index.path)) from None
    return replace(index_read, copy=copy, remote=tokens)


def _read_checked(
    prefix: str, idx: Path, bin_bytes: int, parts: Mapping[int, tuple[float, float]] | None
) -> TokenIndex:
    dtype, lengths, pointers, bounds = _read_header(idx)
    if len(pointers) and pointers[0]:
        raise _corrupt(idx, f"sequence pointer 0 is {pointers[0]}, not 0")
    if not len(pointers) and bin_bytes:
        raise _corrupt(f"{prefix}.bin", f"it holds {bin_bytes} bytes, but its index has a sequence count of 0")
    checksum, part_tokens = 0, dict.fromkeys(parts or {}, 0)
    for first in range(0, len(lengths), CHECKED_ENTRIES):
        block, starts = (
            np.array(lengths[first : first + CHECKED_ENTRIES]),
            pointers[first : first + CHECKED_ENTRIES + 1],
        )
        if len(starts) == len(block):  # after the last sequence, the file ends
            starts = np.append(starts, np.int64(bin_bytes))
        # A pointer that is far off wraps around here, and is then still not equal.
        wrong = np.flatnonzero((starts[:-1] + block * np.int64(dtype.itemsize) != starts[1:]) | (block < 0))
        if len(wrong):
            raise _disagreement(prefix, idx, first + int(wrong[0]), lengths, starts[int(wrong[0]) :], dtype.itemsize)
        checksum = zlib.crc32(block.tobytes(), checksum)
        for part, bounds_of_part in (parts or {}).items():
            begin, end = (max(0, round(bound * len(lengths)) - first) for bound in bounds_of_part)
            part_tokens[part] += int(block[begin:end].sum(dtype=np.int64))
    _check_documents(idx, bounds, len(lengths))
    tokens = bin_bytes // dtype.itemsize
    return TokenIndex(
        prefix=prefix,
        dtype=dtype,
        sequences=len(lengths),
        documents=len(bounds) - 1,
        tokens=tokens,
        identity=f"{dtype} {len(lengths)} {tokens} {checksum:08x}",
        part_tokens=part_tokens,
    )


def _read_header(path: Path) -> tuple[np.dtype[Any], np.ndarray, np.ndarray, np.ndarray]:
    """Return token type, lengths, pointers and document bounds of an index whose header and size are valid."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        header = stream.read(INDEX_HEADER.size)
    if len(header) < INDEX_HEADER.size:
        raise _corrupt(path, f"the header is truncated to {len(header)} of {INDEX_HEADER.size} bytes")
    magic, version, code, sequences, documents = INDEX_HEADER.unpack(header)
    if magic != INDEX_MAGIC:
        raise _corrupt(path, f"the magic is {magic!r}, not {INDEX_MAGIC!r}, this is not a Megatron index")
    if version != INDEX_VERSION:
        raise _corrupt(path, f"the version is {version}, not {INDEX_VERSION}")
    if code not in DTYPES:
        raise _corrupt(path, f"the dtype code is {code}; those of integers, as token ids are, are 1 to 5, and 8")
    after_lengths = INDEX_HEADER.size + 4 * sequences
    after_pointers = after_lengths + 8 * sequences
    stated = after_pointers + 8 * documents
    if size != stated or not documents:
        raise _corrupt(
            path,
            f"it is {'truncated' if size < stated else 'extended'}: sequence count {sequences} and document"
            f" count {documents} make {stated} bytes, but it holds {size}",
        )
    return (
        DTYPES[code],
        _mapped(path, np.int32, INDEX_HEADER.size, sequences),
        _mapped(path, np.int64, after_lengths, sequences),
        _mapped(path, np.int64, after_pointers, documents),
    )


def _corrupt(path: Path | str, what: str) -> CorruptError:
    return CorruptError(f"{path}: {what}; {REMEDY}")


def _disagreement(
    prefix: str, idx: Path, number: int, lengths: np.ndarray, starts: np.ndarray, token_bytes: int
) -> CorruptError:
    """Return the error of a sequence that does not end where the next, or the .bin file, does.

    Args:
        starts: the bytes at which the sequence and the next begin.
    """
    end = int(starts[0]) + int(lengths[number]) * token_bytes
    stated = f"sequence length {number} ({lengths[number]}) and sequence pointer {number} ({starts[0]}) of {idx}"
    if number + 1 < len(lengths):
        return _corrupt(idx, f"by {stated} it ends at {end}, but sequence pointer {number + 1} is {starts[1]}")
    kind = "truncated" if starts[1] < end else "extended"
    return _corrupt(f"{prefix}.bin", f"it is {kind}: it holds {starts[1]} bytes, but ends at {end} by {stated}")


def _check_documents(path: Path, bounds: np.ndarray, sequences: int) -> None:
    """Check that the bounds rise from 0 to the number of sequences. An empty document repeats one.

    Where there are as many documents as sequences, each is one sequence.
    """
    for number, value in ((0, 0), (len(bounds) - 1, sequences)):
        if bounds[number] != value:
            raise _corrupt(path, f"document bound {number} is {bounds[number]}, not {value}")
    least = 1 if len(bounds) == sequences + 1 else 0
    for begin in range(0, len(bounds) - 1, CHECKED_ENTRIES):
        wrong = np.flatnonzero(np.diff(bounds[begin : begin + CHECKED_ENTRIES + 1]) < least)
        if len(wrong):
            number = begin + int(wrong[0]) + 1
            raise _corrupt(path, f"document bound {number} is {bounds[number]}, after {bounds[number - 1]}")


def check_index_ids(index: TokenIndex, vocab_size: int) -> None:
    """Raise InputError if the manifest of a pair states an id outside [0, vocab_size).

    Without a manifest, and with one of another file, ids are checked where they are read.
    """
    stated = manifest_of(index.prefix, BIN_SUFFIX, index.tokens * index.dtype.itemsize)
    refuse_largest_id(None if stated is None else stated[1].max_token_id, vocab_size, index.prefix)


def refuse_largest_id(largest: int | None, vocab_size: int, name: str) -> None:
    """Raise InputError, naming `name`, if the largest id that a manifest states is outside [0, vocab_size)."""
    if largest is not None and largest >= vocab_size:
        raise InputError(
            f"{name} holds token id {largest}, outside the vocabulary of {vocab_size};"
            " train with the tokenizer that made the tokens, or raise model.vocab_size"
        )


def refuse_ids_read(ids: np.ndarray, vocab_size: int, file: Path | str, first: int) -> None:
    """Raise CorruptError, with the first of them and its place, if ids that were read are not below `vocab_size`.

    Under tensor parallelism nothing else would notice: each rank takes an id outside its part of the embedding for
    another's.

    Args:
        ids: [t] as they are stored.
        first: number of the first of them in `file`, counted from 0.
    """
    unsigned = ids.view(UNSIGNED[ids.itemsize])  # a negative id is a large one
    if not len(ids) or unsigned.max() < vocab_size:
        return
    place = int(np.argmax(unsigned >= vocab_size))
    raise CorruptError(
        f"{file} holds token id {ids[place]} (token {first + place:,}, counted from 0), outside the vocabulary of "
        f"{vocab_size}; train with the tokenizer that made the tokens, or copy or prepare the file again"
    )


class PairReader:
    """The tokens of a pair whose index was checked; takes the place of megatron-core's IndexedDataset in its
    GPTDataset.
    """

    def __init__(self, index: TokenIndex, vocab_size: int) -> None:
        self._vocab_size, self._dtype, self._remote = vocab_size, index.dtype, index.remote
        self._path = redacted(index.prefix) + BIN_SUFFIX
        self._tokens = None if index.remote else np.memmap(bin_path(index.prefix), index.dtype, mode="r")
        self._pointers, self._end = index.pointers, index.tokens * index.dtype.itemsize

    def place(self, sequence: int) -> tuple[int, int]:
        """Return the number of a sequence's first token in the .bin file, and its length in tokens."""
        begin, *rest = self._pointers[sequence : sequence + 2].tolist()
        end = rest[0] if rest else self._end
        return begin // self._dtype.itemsize, (end - begin) // self._dtype.itemsize

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return [length] tokens of sequence `idx` from its token `offset` on; None: all that follow.

        Raises:
            CorruptError: an id is outside the vocabulary.
        """
        begin, whole = self.place(int(idx))
        first = begin + offset
        count = whole - offset if length is None else int(length)
        if self._remote is not None:
            ids = self._remote.values(self._dtype, first, count)
        else:
            assert self._tokens is not None
            ids = self._tokens[first : first + count]
        refuse_ids_read(ids, self._vocab_size, self._path, first)
        return ids
