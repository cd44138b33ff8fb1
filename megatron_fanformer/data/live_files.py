"""Files that a run reads here and there while it goes on: kept open, never mapped, and as they were when checked.

megatron-core maps token files and sample indices into memory. A process does not survive the use of a mapped page that
its file has lost, and nothing is printed; of an index that was overwritten it reads other tokens, and nothing is
noticed. Here files are read, and whatever says where tokens are is held against sums that were taken when the whole
file was checked, a sum for each block.
"""

import itertools
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from isal import isal_zlib

from megatron_fanformer.data.open_files import OPEN
from megatron_fanformer.errors import CorruptError

_NUMBERS = itertools.count()
BLOCK_BYTES = 1024
"""Size of a block with its own sum: a small part of what a disk reads at once; the sum is 4 bytes in memory."""
READ_BYTES = 1 << 22


class LiveFile:
    """A file that stays the one it was when this was made: kept open while there are descriptors, and known again.

    Raises:
        CorruptError: it cannot be opened.
        InputError: there is no descriptor left.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._key = next(_NUMBERS)
        try:
            found = os.fstat(OPEN.of(self._key, path)[0])
        except OSError as error:
            raise self._unreadable(error) from error
        self.size, self._place = found.st_size, (found.st_dev, found.st_ino)
        weakref.finalize(self, OPEN.close, self._key)

    def read(self, count: int, offset: int) -> bytes:
        """Read `count` bytes from byte `offset` on.

        Raises:
            CorruptError: the file has become shorter, or cannot be read.
        """
        try:
            descriptor, is_new = OPEN.of(self._key, self.path)
            if is_new:
                found = os.fstat(descriptor)
                if (found.st_dev, found.st_ino) != self._place:
                    OPEN.close(self._key)  # or the next read would take it for the one that it was
                    raise CorruptError(f"{self.path} is another file than when the run began; put it back and resume")
            content = os.pread(descriptor, count, offset)
            while len(content) < count:  # the end of the file, or of what a file system returns at a time
                if not (more := os.pread(descriptor, count - len(content), offset + len(content))):
                    raise CorruptError(f"{self.path} has become shorter since the run began; copy it again and resume")
                content += more
        except OSError as error:
            raise self._unreadable(error) from error
        return content

    def values(self, dtype: np.dtype[Any], first: int, count: int) -> np.ndarray:
        """Return [count] values from number `first` on, of a file that holds nothing else.

        Raises:
            CorruptError: as `read`.
        """
        return np.frombuffer(self.read(count * dtype.itemsize, first * dtype.itemsize), dtype)

    def __reduce__(self) -> Any:
        return LiveFile, (self.path,)

    def _unreadable(self, error: OSError) -> CorruptError:
        return CorruptError(f"{self.path} cannot be read ({error.strerror}); copy it again and resume")


class SummedFile:
    """A part of a file, with the sum of each of its blocks.

    Args:
        path: of the file.
        sums: [blocks] uint32, by `block_sums` of that part.
        first: the byte at which the part begins.
        size: bytes of the part.

    Raises:
        CorruptError: the file cannot be opened.
    """

    def __init__(self, path: Path, sums: np.ndarray, *, first: int, size: int) -> None:
        self._file = LiveFile(path)
        self._sums, self._first, self._size = sums, first, size

    def read(self, count: int, offset: int) -> bytes:
        """Read `count` bytes from byte `offset` of the part on, which must be in it.

        Raises:
            CorruptError: the blocks that hold them are not what they were, or cannot be read.
        """
        block = offset // BLOCK_BYTES
        begin = block * BLOCK_BYTES
        end = min(self._size, -(-(offset + count) // BLOCK_BYTES) * BLOCK_BYTES)
        content = self._file.read(end - begin, self._first + begin)
        for start in range(0, len(content), BLOCK_BYTES):
            if isal_zlib.crc32(content[start : start + BLOCK_BYTES]) != self._sums[block]:
                at = self._first + block * BLOCK_BYTES
                raise CorruptError(
                    f"{self._file.path} has been overwritten since it was checked (at bytes {at} to "
                    f"{at + BLOCK_BYTES - 1}); copy it again, and resume"
                )
            block += 1
        return content[offset - begin : offset - begin + count]


class StoredArray:
    """The array of a `.npy` file, read an entry at a time; takes the place of one that is mapped.

    Args:
        mapped: as `numpy.load` maps it.
        sums: [blocks] uint32, of the whole file.

    Raises:
        CorruptError: the file cannot be opened; an entry is not what it was, or cannot be read.
    """

    def __init__(self, mapped: "np.memmap[Any, Any]", sums: np.ndarray) -> None:
        path = Path(str(mapped.filename))
        self.shape, self.dtype = mapped.shape, mapped.dtype
        self._first = mapped.offset
        self._entry_bytes = mapped.nbytes // len(mapped)
        self._file = SummedFile(path, sums, first=0, size=mapped.offset + mapped.nbytes)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, number: int) -> Any:
        """Entry `number`, counted from 0: a number, or an array of the further dimensions."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self.entries(int(number), 1)[0]

    def entries(self, first: int, count: int) -> np.ndarray:
        """Return [count] entries from number `first` on, all of which it must have; raises as `__getitem__`."""
        content = self._file.read(count * self._entry_bytes, self._first + first * self._entry_bytes)
        return np.frombuffer(content, self.dtype).reshape(-1, *self.shape[1:])


def block_sums(content: bytes) -> np.ndarray:
    """Return [blocks] uint32: the CRC-32 of each block of some bytes, which begin where a block does."""
    view = memoryview(content)
    return np.array(
        [isal_zlib.crc32(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES)], np.uint32
    )


def crc32_of(path: Path) -> int:
    """Return the CRC-32 of a file."""
    value = 0
    with path.open("rb", buffering=0) as stream:
        while content := stream.read(READ_BYTES):
            value = isal_zlib.crc32(content, value)
    return value


def block_sums_of_file(path: Path, *, blocks_at_once: int = 1024) -> np.ndarray:
    """Return [blocks] uint32: the CRC-32 of each block of a whole file, which is read once."""
    sums = []
    with path.open("rb") as stream:
        while content := stream.read(blocks_at_once * BLOCK_BYTES):
            sums.append(block_sums(content))
    return np.concatenate(sums) if sums else np.empty(0, np.uint32)
