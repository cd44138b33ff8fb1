"""Megatron's token files: `PREFIX.bin` holds the tokens, `PREFIX.idx` the lengths of the sequences.

The index is a header of 34 bytes (magic, version, dtype code, sequence count, document count), then the lengths
(int32) and byte pointers (int64) of the sequences, and the document bounds (int64): the sequences at which documents
begin, and their number at the end. `prepare` makes every document one sequence; Megatron-LM's own tools may not.
"""

import functools
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.data.file_tasks import Advance
from megatron_fanformer.data.id_bounds import is_read, refuse_ids_outside, refuse_ids_read
from megatron_fanformer.data.live_files import LiveFile, SummedFile, block_sums
from megatron_fanformer.data.manifest import manifest_of
from megatron_fanformer.data.notes import note_path
from megatron_fanformer.data.remote_files import RemoteFile, copy_to, find, look_up, only_one_at_a_time
from megatron_fanformer.errors import CorruptError, InputError, redacted
from megatron_fanformer.stores import is_url, reported_as_local

BIN_SUFFIX = ".bin"
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")
INDEX_VERSION = 1
POINTERS = struct.Struct("<qq")  # of a sequence and the one after it
# The integers of megatron-core's DType by their code in the header; 6 and 7 are of floats, which no token ids are.
DTYPES = {code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}.items()}
# From this vocabulary size on megatron-core's DType.optimal_dtype picks int32.
UINT16_VOCABULARY = 65_500
# Entries of an index that are checked at a time: some 30 MB of memory, and whole blocks of sums.
CHECKED_ENTRIES = 1 << 20
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
    pointer_sums: np.ndarray = field(compare=False)
    """[blocks] uint32, 32 bytes for a thousand sequences: later reads of the byte pointers are checked against them."""
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
        """[sequences] int32, tokens of each sequence."""
        return _Array(self.idx, np.int32, INDEX_HEADER.size, self.sequences).map()

    @property
    def bounds(self) -> np.ndarray:
        """[documents + 1] int64, the sequence at which each document begins, and the number of sequences."""
        first = INDEX_HEADER.size + (4 + 8) * self.sequences  # after the lengths and the pointers
        return _Array(self.idx, np.int64, first, self.documents + 1).map()


@dataclass(frozen=True)
class _Array:
    """One of an index file's arrays. Blocks that are read, unlike a memory map, leave no memory occupied."""

    path: Path
    dtype: type
    first_byte: int
    count: int

    @property
    def end_byte(self) -> int:
        return self.first_byte + self.count * np.dtype(self.dtype).itemsize

    def read(self, first: int, count: int) -> np.ndarray:
        """Read at most [count] entries from `first` on."""
        size = np.dtype(self.dtype).itemsize
        count = max(0, min(count, self.count - first))
        return np.fromfile(self.path, self.dtype, count, offset=self.first_byte + first * size)

    def __getitem__(self, number: int) -> int:
        return int(self.read(number, 1)[0])

    def map(self) -> np.ndarray:
        if not self.count:
            return np.empty(0, self.dtype)
        return np.memmap(self.path, self.dtype, mode="r", offset=self.first_byte, shape=(self.count,))


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
    folder = note_path(cache / "remote", index.identity).with_suffix("")
    copy = str(folder / prefix.rpartition("/")[2])
    index_copy, stand_in = idx_path(copy), bin_path(copy)
    with only_one_at_a_time(folder):
        if index.version is None or not index_copy.is_file() or index_copy.stat().st_size != index.size:
            copy_to(index, index_copy)
        if not stand_in.is_file():
            with reported_as_local(folder):
                stand_in.write_bytes(b"0")  # not of the size that it has there: reading it must fail
    try:
        found = _read_checked(prefix, index_copy, tokens.size, parts)
    except CorruptError as error:
        index_copy.unlink(missing_ok=True)  # should only the copy be damaged
        raise CorruptError(str(error).replace(str(index_copy), index.path)) from None
    return replace(found, copy=copy, remote=tokens)


def _read_checked(
    prefix: str, idx: Path, bin_bytes: int, parts: Mapping[int, tuple[float, float]] | None
) -> TokenIndex:
    dtype, lengths, pointers, bounds = _read_header(idx)
    sums = _Sums({part: [round(bound * lengths.count) for bound in own] for part, own in (parts or {}).items()})
    _check_sequences(prefix, dtype, lengths, pointers, bin_bytes, sums)
    _check_documents(bounds, lengths.count)
    tokens = bin_bytes // dtype.itemsize
    return TokenIndex(
        prefix=prefix,
        dtype=dtype,
        sequences=lengths.count,
        documents=bounds.count - 1,
        tokens=tokens,
        identity=f"{dtype} {lengths.count} {tokens} {sums.checksum:08x}",
        part_tokens=sums.part_tokens,
        pointer_sums=np.concatenate([np.empty(0, np.uint32), *sums.of_pointers]),
    )


def document_of(idx: Path, sequence: int) -> int:
    """Return the number of the document, from 0, that a sequence is in, by the path of its index."""
    *_, bounds = _read_header(idx)
    return int(np.searchsorted(bounds.read(0, bounds.count), sequence, side="right")) - 1


class _Sums:
    """The sums over all lengths and pointers, computed block by block.

    A checksum of the lengths, the tokens of parts (first sequence, end), and the pointers' own sums.
    """

    def __init__(self, parts: dict[int, list[int]]) -> None:
        self.checksum = 0
        self.part_tokens = dict.fromkeys(parts, 0)
        self.of_pointers: list[np.ndarray] = []
        self._parts = parts

    def add(self, first: int, block: np.ndarray, pointers: np.ndarray) -> None:
        """Add the lengths and pointers of the sequences from `first` on, CHECKED_ENTRIES of them but at the end."""
        self.checksum = zlib.crc32(block.tobytes(), self.checksum)
        self.of_pointers.append(block_sums(pointers.tobytes()))
        for number, (begin, end) in self._parts.items():
            own = block[max(0, begin - first) : max(0, end - first)]
            self.part_tokens[number] += int(own.sum(dtype=np.int64))


def _read_header(path: Path) -> tuple[np.dtype[Any], _Array, _Array, _Array]:
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
    lengths = _Array(path, np.int32, INDEX_HEADER.size, sequences)
    pointers = _Array(path, np.int64, lengths.end_byte, sequences)
    bounds = _Array(path, np.int64, pointers.end_byte, documents)
    if size != bounds.end_byte or not documents:
        raise _corrupt(
            path,
            f"it is {'truncated' if size < bounds.end_byte else 'extended'}: sequence count {sequences} and document"
            f" count {documents} make {bounds.end_byte} bytes, but it holds {size}",
        )
    return DTYPES[code], lengths, pointers, bounds


def _corrupt(path: Path | str, what: str) -> CorruptError:
    return CorruptError(f"{path}: {what}; {REMEDY}")


def _check_sequences(
    prefix: str, dtype: np.dtype[Any], lengths: _Array, pointers: _Array, bin_bytes: int, sums: _Sums
) -> None:
    """Check each pointer against the length before it, and the end of the last sequence against the .bin file.

    `sums` gets all lengths and pointers.
    """
    path = lengths.path
    if pointers.count and pointers[0]:
        raise _corrupt(path, f"sequence pointer 0 is {pointers[0]}, not 0")
    if not pointers.count and bin_bytes:
        raise _corrupt(f"{prefix}.bin", f"it holds {bin_bytes} bytes, but its index has a sequence count of 0")
    for begin in range(0, lengths.count, CHECKED_ENTRIES):
        block = lengths.read(begin, CHECKED_ENTRIES)
        if block.min() < 0:
            number = begin + int(block.argmin())
            raise _corrupt(path, f"sequence length {number} is {lengths[number]}, which is negative")
        starts = pointers.read(begin, len(block) + 1)
        if len(starts) == len(block):  # after the last sequence, the file ends
            starts = np.append(starts, bin_bytes)
        # A pointer that is far off wraps around here, and is then still not equal.
        wrong = np.flatnonzero(starts[:-1] + block * np.int64(dtype.itemsize) != starts[1:])
        if len(wrong):
            raise _disagreement(prefix, begin + int(wrong[0]), dtype, lengths, pointers, bin_bytes)
        sums.add(begin, block, starts[: len(block)])


def _disagreement(
    prefix: str, number: int, dtype: np.dtype[Any], lengths: _Array, pointers: _Array, bin_bytes: int
) -> CorruptError:
    """Says which field is wrong, where sequence `number` is the first that does not end where the next begins."""
    path = lengths.path

    def end(sequence: int) -> int:
        return pointers[sequence] + lengths[sequence] * dtype.itemsize

    if number + 1 == lengths.count:
        return _corrupt(
            f"{prefix}.bin",
            f"it is {'truncated' if bin_bytes < end(number) else 'extended'}, or not of this index: it holds"
            f" {bin_bytes} bytes, but by sequence length {number} ({lengths[number]}) of {path} ends at {end(number)}",
        )
    after_next = bin_bytes if number + 2 == lengths.count else pointers[number + 2]
    if end(number + 1) == after_next:  # the pointers agree among themselves
        return _corrupt(
            path,
            f"sequence length {number} is {lengths[number]}, but its {dtype} tokens fill bytes {pointers[number]}"
            f" to {pointers[number + 1]}",
        )
    return _corrupt(
        path,
        f"sequence pointer {number + 1} is {pointers[number + 1]}, but the {dtype} tokens before it end at"
        f" {end(number)}",
    )


def _check_documents(bounds: _Array, sequences: int) -> None:
    """Check that the bounds rise from 0 to the number of sequences. An empty document repeats one.

    Where there are as many documents as sequences, each is one sequence.
    """
    for number, value in ((0, 0), (bounds.count - 1, sequences)):
        if bounds[number] != value:
            raise _corrupt(bounds.path, f"document bound {number} is {bounds[number]}, not {value}")
    least = 1 if bounds.count == sequences + 1 else 0
    for begin in range(0, bounds.count - 1, CHECKED_ENTRIES):
        wrong = np.flatnonzero(np.diff(bounds.read(begin, CHECKED_ENTRIES + 1)) < least)
        if len(wrong):
            number = begin + int(wrong[0]) + 1
            raise _corrupt(bounds.path, f"document bound {number} is {bounds[number]}, after {bounds[number - 1]}")


def check_index_ids(
    index: TokenIndex, vocab_size: int, *, cache: Path | None = None, advance: Advance = lambda _bytes: None
) -> None:
    """Raise InputError for a pair that holds an id outside [0, vocab_size).

    The manifest is trusted if it records this .bin file's size; otherwise all tokens are read, and what is found in a
    large file is remembered in the folder `cache`; of one on another store, ids are checked as they are read.
    """
    largest = _recorded_largest(index)
    if index.remote is not None and largest is None:
        return
    path = bin_path(index.prefix)
    refuse_ids_outside(vocab_size, index.prefix, path, index.dtype, largest=largest, cache=cache, advance=advance)


def reads_ids(index: TokenIndex, vocab_size: int) -> bool:
    """Return whether `check_index_ids` reads the tokens."""
    return index.remote is None and _recorded_largest(index) is None and is_read(index.dtype, vocab_size)


def _recorded_largest(index: TokenIndex) -> int | None:
    found = manifest_of(index.prefix, BIN_SUFFIX, index.tokens * index.dtype.itemsize)
    return None if found is None else found[1].max_token_id


# -- reading while a run goes on


class PairReader:
    """A pair whose index was checked; takes the place of megatron-core's IndexedDataset in its GPTDataset.

    Ids are below `vocab_size`.

    Raises:
        CorruptError: a file cannot be read.
    """

    def __init__(self, index: TokenIndex, vocab_size: int) -> None:
        self._idx, self._vocab_size = index.idx, vocab_size
        self._size, self._dtype = index.dtype.itemsize, index.dtype
        self._tokens = index.remote or LiveFile(bin_path(index.prefix))
        place = {"first": INDEX_HEADER.size + 4 * index.sequences, "size": 8 * index.sequences}  # after the lengths
        self._pointers = SummedFile(index.idx, index.pointer_sums, **place)
        self._last, self._end = index.sequences - 1, self._tokens.size

    def place(self, sequence: int) -> tuple[int, int]:
        """Return the number of a sequence's first token in the .bin file, and its length in tokens.

        Raises:
            CorruptError: the index has become shorter, was overwritten, or cannot be read.
        """
        offset = 8 * int(sequence)
        if sequence < self._last:
            begin, end = POINTERS.unpack(self._pointers.read(16, offset))
        else:
            begin, end = int.from_bytes(self._pointers.read(8, offset), "little"), self._end
        return begin // self._size, (end - begin) // self._size

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return [length] tokens of sequence `idx` from its token `offset` on; None: all that follow.

        Raises:
            CorruptError: a file has become shorter, was overwritten, or cannot be read; an id outside the vocabulary.
        """
        first, whole = self.place(idx)
        count = whole - offset if length is None else int(length)
        content = self._tokens.read(count * self._size, (first + offset) * self._size)
        ids = np.frombuffer(content, self._dtype)
        document = functools.partial(document_of, self._idx, int(idx))
        refuse_ids_read(ids, self._vocab_size, self._tokens.path, first + offset, document=document)
        return ids
