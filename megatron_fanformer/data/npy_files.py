"""The paper's token files: `.npy` without NumPy's header, token ids in little-endian order and nothing else.

They are read in place, without a copy.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_fanformer.data.manifest import MANIFEST_SUFFIX, read_any_manifest, token_files_record
from megatron_fanformer.data.remote_files import RemoteFile, find, look_up, look_up_contents, side_by_side
from megatron_fanformer.errors import CorruptError, InputError, redacted
from megatron_fanformer.stores import is_url

NpyType = Literal["uint16", "uint32"]

SUFFIX = ".npy"
SUFFIXES = (SUFFIX, ".ds")  # the same by datatrove's name for it
NUMPY_MAGIC = b"\x93NUMPY"
# The types of files with a manifest; what `prepare` writes.
MANIFEST_TYPES = ("uint16", "uint32", "int32")


def npy_prefix(path: str) -> str:
    """Return the prefix of a .npy file, under which its manifest and ledger are stored."""
    return path.removesuffix(SUFFIX)


@dataclass(frozen=True)
class NpyFile:
    """One file of token ids."""

    path: str
    dtype: np.dtype[Any]
    tokens: int
    max_token_id: int | None
    """The largest token id by its manifest; None where it has none."""
    remote: RemoteFile | None = None
    """The file, if it is on another store and `path` a URL."""

    def read(self, first: int, count: int) -> np.ndarray:
        """Return [count] tokens from number `first` on."""
        if self.remote is not None:
            return self.remote.values(self.dtype, first, count)
        return self._mapped[first : first + count]

    @functools.cached_property
    def _mapped(self) -> np.ndarray:
        return np.memmap(self.path, self.dtype, mode="r")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_mapped"}


def open_npy_files(paths: Iterable[str], dtype: NpyType) -> list[NpyFile]:
    """Check each file; `dtype` is the type of those that have no manifest beside them.

    Raises:
        InputError: a file that is missing, that has NumPy's own header, or with a manifest of another name's files.
        CorruptError: a file that ends within a token, or of another size than its manifest says.
    """
    paths = list(paths)
    urls = [path for path in paths if is_url(path)]
    look_up(urls)
    look_up_contents(npy_prefix(url) + MANIFEST_SUFFIX for url in urls)
    if urls:
        return side_by_side(lambda path: _open(path, dtype), paths)
    return [_open(path, dtype) for path in paths]


def _open(path: str, stated: NpyType) -> NpyFile:
    remote = find(path) if is_url(path) else None
    if remote is None and not Path(path).is_file():
        raise InputError(f"{redacted(path)} does not exist; name .npy files of token ids")
    if remote is not None:
        size, begin = remote.size, remote.read(min(len(NUMPY_MAGIC), remote.size), 0)
    else:
        size = Path(path).stat().st_size
        with open(path, "rb") as stream:
            begin = stream.read(len(NUMPY_MAGIC))
    if begin == NUMPY_MAGIC:
        raise InputError(
            f"{redacted(path)} has NumPy's own header, token files are ids alone; write the ids to another file with "
            "numpy.load(FILE).astype('<u4').tofile(OTHER), and set data.npy_dtype: uint32"
        )
    dtype, largest = _by_manifest(path, size) or (stated, None)
    kind = np.dtype(dtype).newbyteorder("<")
    if size % kind.itemsize:
        raise CorruptError(
            f"{path} holds {size} bytes, not a multiple of {kind.itemsize}, a token of {dtype}; copy it again, or"
            " set data.npy_dtype to its type"
        )
    return NpyFile(path, kind, size // kind.itemsize, largest, remote)


def _by_manifest(path: str, size: int) -> tuple[str, int] | None:
    """Return the type of the ids and the largest of them, by the manifest beside a file; None where there is none."""
    prefix = npy_prefix(path)
    record, manifest = token_files_record(prefix), read_any_manifest(prefix)
    if manifest is None:
        return None
    if record is None:  # it would say the type, which is not to be guessed where it was renamed with its file
        raise InputError(
            f"{redacted(prefix)}{MANIFEST_SUFFIX} is of files of another name, and not of {redacted(path)}; give both"
            " the name that it states, or remove it and set data.npy_dtype to the file's type"
        )
    if SUFFIX not in record.files:
        return None
    dtype, recorded = manifest.settings.dtype, record.files[SUFFIX].bytes
    if dtype not in MANIFEST_TYPES:
        known = ", ".join(MANIFEST_TYPES)
        raise CorruptError(f"{prefix}{MANIFEST_SUFFIX}: dtype is {dtype}, not one of {known}; prepare again")
    if size != recorded:
        raise CorruptError(
            f"{path} holds {size} bytes, but {prefix}{MANIFEST_SUFFIX} says {recorded}; copy or prepare it again, or"
            " remove the manifest if it is another file's"
        )
    return dtype, record.max_token_id


def whole_samples(files: Sequence[NpyFile], seq_length: int) -> int:
    """Return the samples of one epoch, each a run of tokens of one file. Raises InputError if there is none."""
    samples = sum(file.tokens // seq_length for file in files)
    if not samples:
        raise InputError(
            f"{len(files)} .npy files hold no whole sample of {seq_length} tokens; change the files or model.seq_length"
        )
    return samples
