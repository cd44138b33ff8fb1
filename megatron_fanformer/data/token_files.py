"""Token files: Megatron's pairs of a .bin and an .idx file, and the paper's .npy files.

The .bin file of a pair holds the tokens. Its index, the .idx file, has a header of 34 bytes (magic, version, dtype
code, sequence count, document count); the lengths (int32) and the byte pointers (int64) of the sequences; and the
document bounds (int64): the first sequence of each document, and at the end the number of sequences. `prepare` writes
a document as one sequence; Megatron-LM's own tools may write several. A .npy file holds little-endian ids alone.
"""

import functools
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_fanformer.data.manifest import MANIFEST_SUFFIX, find_record, manifest_for_file, read_manifest
from megatron_fanformer.data.remote_files import (
    RemoteFile,
    copy_to,
    find_file,
    hold_folder,
    look_up,
    map_in_threads,
    read_small_files,
    version_folder,
)
from megatron_fanformer.errors import CorruptError, InputError, redacted
from megatron_fanformer.stores import is_url, reported_as_local

NpyType = Literal["uint16", "uint32"]

BIN_SUFFIX, NPY_SUFFIX = ".bin", ".npy"
NUMPY_MAGIC = b"\x93NUMPY"
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_HEADER = struct.Struct("<9sQBQQ")
INDEX_VERSION = 1
# The integer types of megatron-core's DType, by their code in the header; 6 and 7 are floats.
DTYPES = {code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 8: "u2"}.items()}
CHECKED_ENTRIES = 1 << 20  # of an index, checked at a time: some 30 MB of memory
UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def bin_path(prefix: str) -> Path:
    """Return the path of a prefix's .bin file."""
    return Path(prefix + BIN_SUFFIX)


def idx_path(prefix: str) -> Path:
    """Return the path of a prefix's index."""
    return Path(prefix + ".idx")


def npy_prefix(path: str) -> str:
    """Return the prefix of a .npy file, under which its manifest and ledger are stored."""
    return path.removesuffix(NPY_SUFFIX)


def token_dtype(vocab_size: int) -> str:
    """Return the token type for a vocabulary, by the rule of megatron-core's DType.optimal_dtype."""
    return "uint16" if vocab_size < 65_500 else "int32"


# -- token ids below the vocabulary size


def refuse_stated_ids(prefix: str, suffix: str, size: int, vocab_size: int) -> None:
    """Raise InputError if the manifest of a file of `size` bytes states an id that is not below `vocab_size`.

    Without a manifest of the file, ids are checked as they are read.
    """
    if (described := manifest_for_file(prefix, suffix, size)) is not None:
        _, record = described
        refuse_largest_id(record.max_token_id, vocab_size, prefix)


def refuse_largest_id(largest: int | None, vocab_size: int, name: str) -> None:
    """Raise InputError if `largest`, the largest id that the manifest of `name` states, is not below `vocab_size`."""
    if largest is not None and largest >= vocab_size:
        raise InputError(
            f"{name} holds token id {largest}, outside the vocabulary of {vocab_size};"
            " prepare the tokens with the model's tokenizer, or train with a larger model.vocab_size"
        )


def refuse_ids_read(ids: np.ndarray, vocab_size: int, file: Path | str, first: int) -> None:
    """Raise CorruptError, naming the first wrong id and its place, if an id is negative or not below `vocab_size`.

    Under tensor parallelism nothing else would notice: a rank assumes that any id outside its part of the embedding
    belongs to another rank's part. `ids` are [tokens] in the file's type, from token number `first` of `file` on.
    """
    unsigned = ids.view(UNSIGNED[ids.itemsize])  # a negative id is a large one
    if not len(ids) or unsigned.max() < vocab_size:
        return
    place = int(np.argmax(unsigned >= vocab_size))
    raise CorruptError(
        f"{file} holds token id {ids[place]} (token {first + place:,}, counted from 0), outside the vocabulary of "
        f"{vocab_size}; train with the tokenizer that made the tokens, or copy or prepare the file again"
    )


# -- pairs


@dataclass(frozen=True)
class TokenIndex:
    """The checked index of a pair. The arrays are memory maps, opened at each access."""

    prefix: str
    dtype: np.dtype[Any] = DTYPES[8]
    """The type of the token ids."""
    sequences: int = 0
    documents: int = 0
    tokens: int = 0
    identity: str = ""
    """Type, counts and a checksum of the lengths: everything that sample indices depend on."""
    part_tokens: dict[int, int] = field(default_factory=dict)
    """The number of tokens in each requested part, by the part's number."""
    copy: str | None = None
    """For a pair on another store: the prefix of the local copy of the index."""
    remote: RemoteFile | None = None
    """For a pair on another store: the .bin file."""

    @property
    def idx(self) -> Path:
        """Return the path of the index, or of its local copy."""
        return idx_path(self.copy or self.prefix)

    @property
    def lengths(self) -> np.ndarray:
        """Return the number of tokens in each sequence, [sequences] int32."""
        return _map_array(self.idx, np.int32, INDEX_HEADER.size, self.sequences)

    @property
    def pointers(self) -> np.ndarray:
        """Return the byte of the .bin file at which each sequence begins, [sequences] int64."""
        return _map_array(self.idx, np.int64, INDEX_HEADER.size + 4 * self.sequences, self.sequences)

    @property
    def bounds(self) -> np.ndarray:
        """Return the first sequence of each document, and last the number of sequences, [documents + 1] int64."""
        return _map_array(self.idx, np.int64, INDEX_HEADER.size + (4 + 8) * self.sequences, self.documents + 1)

    def refuse_stated_ids(self, vocab_size: int) -> None:
        """Raise InputError if the pair's manifest states an id that is not below `vocab_size`."""
        refuse_stated_ids(self.prefix, BIN_SUFFIX, self.tokens * self.dtype.itemsize, vocab_size)


def _map_array(path: Path, dtype: type, first_byte: int, count: int) -> np.ndarray:
    return np.memmap(path, dtype, mode="r", offset=first_byte, shape=(count,)) if count else np.empty(0, dtype)


def read_index(
    prefix: str, parts: Mapping[int, tuple[float, float]] | None = None, *, cache: Path | None = None
) -> TokenIndex:
    """Read the index of a prefix once, in blocks, and check its entries against each other and the .bin file's size.

    Args:
        parts: the parts whose tokens to count, by number. A part begins and ends at two fractions of the sequences,
            rounded to whole sequences as megatron-core rounds them.
        cache: the folder to which the index of a pair on another store is copied, once for each version of the index.

    Raises:
        InputError: a file is missing.
        CorruptError: the index has another format, belongs to another .bin file, or has a wrong entry, which the
            message names.
    """
    if is_url(prefix):
        return _read_remote_index(prefix, parts, cache)
    for path in (bin_path(prefix), idx_path(prefix)):
        if not path.is_file():
            raise InputError(f"{path} does not exist; name the prefix of a .bin and .idx pair")
    return _check_entries(TokenIndex(prefix), bin_path(prefix).stat().st_size, parts)


def _read_remote_index(prefix: str, parts: Mapping[int, tuple[float, float]] | None, cache: Path | None) -> TokenIndex:
    """Copy the index of a pair on another store into `cache`, and read the copy; see `read_index`."""
    bin_file, idx_file = look_up([prefix + ".bin", prefix + ".idx"])
    if bin_file is None or idx_file is None:
        path = redacted(prefix + (".bin" if bin_file is None else ".idx"))
        raise InputError(f"{path} does not exist; name the prefix of a .bin and .idx pair, or a folder, ending in /")
    if cache is None:
        raise InputError(f"{redacted(prefix)} is on another store, and its index is copied; set data.cache_path")
    folder = version_folder(cache / "remote", idx_file.identity)
    copy = str(folder / prefix.rpartition("/")[2])
    index_copy, stand_in = idx_path(copy), bin_path(copy)
    with hold_folder(folder):
        is_copied = index_copy.is_file() and index_copy.stat().st_size == idx_file.size
        if idx_file.version is None or not is_copied:  # without a version, the index may have changed since
            copy_to(idx_file, index_copy)
        if not stand_in.is_file():
            with reported_as_local(folder):
                stand_in.write_bytes(b"0")  # megatron-core requires a .bin file; no token can be read from this one
    try:
        return _check_entries(TokenIndex(prefix, copy=copy, remote=bin_file), bin_file.size, parts)
    except CorruptError as error:
        index_copy.unlink(missing_ok=True)  # in case only the copy is damaged
        raise CorruptError(str(error).replace(str(index_copy), idx_file.path)) from None


def _check_entries(index: TokenIndex, bin_bytes: int, parts: Mapping[int, tuple[float, float]] | None) -> TokenIndex:
    """Check an index and the size of its .bin file, and return the index with its counts; see `read_index`."""
    index = _read_header(index)
    lengths, pointers, bounds, token_bytes = index.lengths, index.pointers, index.bounds, index.dtype.itemsize
    checksum, end, part_tokens = 0, 0, dict.fromkeys(parts or {}, 0)  # `end`: the byte where the last sequence ends
    for first in range(0, len(lengths), CHECKED_ENTRIES):
        block = np.array(lengths[first : first + CHECKED_ENTRIES])  # lengths of sequences
        ends = end + np.cumsum(block, dtype=np.int64) * token_bytes
        starts = np.append(np.int64(end), ends[:-1])
        if len(wrong := np.flatnonzero(pointers[first : first + CHECKED_ENTRIES] != starts)):
            number = first + int(wrong[0])
            stated = f"sequence pointer {number} is {pointers[number]}"
            raise _corrupt(index.idx, f"{stated}, but the sequence lengths before it end at {starts[wrong[0]]}")
        end = int(ends[-1])
        checksum = zlib.crc32(block.tobytes(), checksum)
        for part, fractions in (parts or {}).items():
            # Where the part begins and stops in this block. It may stop beyond the block: slicing allows that.
            begin, stop = (max(0, round(fraction * len(lengths)) - first) for fraction in fractions)
            part_tokens[part] += int(block[begin:stop].sum(dtype=np.int64))
    if bin_bytes != end:
        kind = "truncated" if bin_bytes < end else "extended"
        message = f"it is {kind}: it holds {bin_bytes} bytes, but the sequence lengths of {index.idx} end at {end}"
        raise _corrupt(f"{index.prefix}.bin", message)
    if (bounds[0], bounds[-1]) != (0, len(lengths)):
        stated = f"the first document bound is {bounds[0]}, the last {bounds[-1]}"
        raise _corrupt(index.idx, f"{stated}, not 0 and {len(lengths)}")
    # An empty document repeats a bound. With as many documents as sequences, each must be one sequence: none is empty.
    least_step = 1 if index.documents == len(lengths) else 0
    for first in range(0, index.documents, CHECKED_ENTRIES):
        if len(wrong := np.flatnonzero(np.diff(bounds[first : first + CHECKED_ENTRIES + 1]) < least_step)):
            number = first + int(wrong[0]) + 1
            raise _corrupt(index.idx, f"document bound {number} is {bounds[number]}, after {bounds[number - 1]}")
    tokens = bin_bytes // token_bytes
    identity = f"{index.dtype} {len(lengths)} {tokens} {checksum:08x}"
    return replace(index, tokens=tokens, identity=identity, part_tokens=part_tokens)


def _read_header(index: TokenIndex) -> TokenIndex:
    """Return an index with the type and the counts in its header. Raises CorruptError if they are wrong."""
    path = index.idx
    size = path.stat().st_size
    with path.open("rb") as stream:
        header = stream.read(INDEX_HEADER.size)
    if len(header) < INDEX_HEADER.size:
        raise _corrupt(path, f"it is truncated: the header has {len(header)} of {INDEX_HEADER.size} bytes")
    magic, version, code, sequences, bound_count = INDEX_HEADER.unpack(header)
    if magic != INDEX_MAGIC:
        raise _corrupt(path, f"the magic is {magic!r}, not {INDEX_MAGIC!r}, this is not a Megatron index")
    if version != INDEX_VERSION:
        raise _corrupt(path, f"the version is {version}, not {INDEX_VERSION}")
    if code not in DTYPES:
        raise _corrupt(path, f"the dtype code is {code}; those of integers, as token ids are, are 1 to 5, and 8")
    stated = INDEX_HEADER.size + (4 + 8) * sequences + 8 * bound_count
    if size != stated or not bound_count:
        raise _corrupt(
            path,
            f"it is {'truncated' if size < stated else 'extended'}: sequence count {sequences} and document"
            f" count {bound_count} make {stated} bytes, but it holds {size}",
        )
    return replace(index, dtype=DTYPES[code], sequences=sequences, documents=bound_count - 1)


def _corrupt(path: Path | str, problem: str) -> CorruptError:
    return CorruptError(f"{path}: {problem}; copy both files of the pair again, or prepare them again")


class PairReader:
    """Reads the tokens of a pair with a checked index, in place of IndexedDataset in megatron-core's GPTDataset."""

    def __init__(self, index: TokenIndex, vocab_size: int) -> None:
        self._vocab_size, self._dtype, self._remote = vocab_size, index.dtype, index.remote
        self._path = redacted(index.prefix) + BIN_SUFFIX
        self._tokens = None if index.remote else np.memmap(bin_path(index.prefix), index.dtype, mode="r")
        self._pointers, self._end = index.pointers, index.tokens * index.dtype.itemsize

    def locate(self, sequence: int) -> tuple[int, int]:
        """Return the number of a sequence's first token in the .bin file, and its length in tokens."""
        begin, *next_begin = self._pointers[sequence : sequence + 2].tolist()
        end = next_begin[0] if next_begin else self._end  # no other sequence follows the last one
        return begin // self._dtype.itemsize, (end - begin) // self._dtype.itemsize

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return `length` tokens of sequence `idx` from token `offset` on; None: all up to the sequence's end."""
        begin, sequence_length = self.locate(int(idx))
        first = begin + offset
        count = sequence_length - offset if length is None else int(length)
        if self._remote is not None:
            ids = self._remote.values(self._dtype, first, count)
        else:
            assert self._tokens is not None
            ids = self._tokens[first : first + count]
        refuse_ids_read(ids, self._vocab_size, self._path, first)
        return ids


# -- .npy files


@dataclass(frozen=True)
class NpyFile:
    """One .npy file of token ids."""

    path: str
    dtype: np.dtype[Any]
    tokens: int
    max_token_id: int | None
    """The largest token id that the manifest states; None without a manifest."""
    remote: RemoteFile | None = None
    """The file, if `path` is a URL."""

    def read(self, first: int, count: int) -> np.ndarray:
        """Return `count` tokens, [count], from token number `first` on."""
        if self.remote is not None:
            return self.remote.values(self.dtype, first, count)
        return self._array[first : first + count]

    @functools.cached_property
    def _array(self) -> np.ndarray:
        return np.memmap(self.path, self.dtype, mode="r")

    def __getstate__(self) -> dict[str, Any]:
        # Pickling would copy the memory map's tokens.
        return {name: value for name, value in self.__dict__.items() if name != "_array"}


def open_npy_files(paths: Iterable[str], dtype: NpyType) -> list[NpyFile]:
    """Check .npy files, and return them in order; `dtype` is the type of ids in files without a manifest.

    Raises InputError, or CorruptError if a file ends within a token, or if its size contradicts its manifest.
    """
    paths = list(paths)
    urls = [path for path in paths if is_url(path)]
    # These two request files and manifests in parallel, and remember the answers, for which `_open_npy` then asks.
    look_up(urls)
    read_small_files(npy_prefix(url) + MANIFEST_SUFFIX for url in urls)
    open_file = functools.partial(_open_npy, default=dtype)
    return map_in_threads(open_file, paths) if urls else list(map(open_file, paths))


def _open_npy(path: str, default: NpyType) -> NpyFile:
    """Check a .npy file, and return it; `default` is the type of ids without a manifest. See `open_npy_files`."""
    remote = find_file(path) if is_url(path) else None
    if remote is None and not Path(path).is_file():
        raise InputError(f"{redacted(path)} does not exist; name .npy files of token ids")
    if remote is not None:
        size, first_bytes = remote.size, remote.read(min(len(NUMPY_MAGIC), remote.size), 0)
    else:
        size = Path(path).stat().st_size
        with open(path, "rb") as stream:
            first_bytes = stream.read(len(NUMPY_MAGIC))
    if first_bytes == NUMPY_MAGIC:
        raise InputError(
            f"{redacted(path)} has NumPy's own header, token files are ids alone; write the ids to another file with "
            "numpy.load(FILE).astype('<u4').tofile(OTHER), and set data.npy_dtype: uint32"
        )
    type_name, largest = _read_npy_manifest(path, size) or (default, None)
    dtype = np.dtype(type_name).newbyteorder("<")
    if size % dtype.itemsize:
        raise CorruptError(
            f"{path} holds {size} bytes, not a multiple of {dtype.itemsize}, a token of {type_name}; copy it again, or"
            " set data.npy_dtype to its type"
        )
    return NpyFile(path, dtype, size // dtype.itemsize, largest, remote)


def _read_npy_manifest(path: str, size: int) -> tuple[str, int] | None:
    """Return the type of the ids and the largest id that the manifest of a .npy file states; None without one."""
    prefix = npy_prefix(path)
    manifest = read_manifest(prefix)
    if manifest is None:
        return None
    record = find_record(prefix, manifest)
    if record is None:  # a manifest of files of another name; without it, the type of the ids would be a guess
        raise InputError(
            f"{redacted(prefix)}{MANIFEST_SUFFIX} is of files of another name, and not of {redacted(path)}; give both"
            " the name that it states, or remove it and set data.npy_dtype to the file's type"
        )
    if NPY_SUFFIX not in record.files:  # the manifest is that of a pair or of rows with the same prefix
        return None
    recorded = record.files[NPY_SUFFIX].bytes
    if size != recorded:
        raise CorruptError(
            f"{path} holds {size} bytes, but {prefix}{MANIFEST_SUFFIX} says {recorded}; copy or prepare it again, or"
            " remove the manifest if it is another file's"
        )
    return manifest.settings.dtype, record.max_token_id


def whole_samples(files: Sequence[NpyFile], seq_length: int) -> int:
    """Count the samples in an epoch of .npy files; no sample crosses files. Raises InputError if there is no sample."""
    samples = sum(file.tokens // seq_length for file in files)
    if not samples:
        raise InputError(
            f"{len(files)} .npy files hold no whole sample of {seq_length} tokens; change the files or model.seq_length"
        )
    return samples
