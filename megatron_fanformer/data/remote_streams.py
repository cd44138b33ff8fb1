"""Files on other stores as Python's own files, for what reads them from start to end, or seeks, such as pyarrow."""

import io
from typing import Any

from megatron_fanformer.data.remote_files import PART_BYTES, PARTS, RemoteFile, parts_of

SOUGHT_BYTES = 1 << 20  # of a request after a seek: a Parquet file is not read in order


def open_stream(file: RemoteFile) -> io.RawIOBase:
    """Return the bytes of a file; reading raises like `read_ranges`."""
    return _Stream(file)


class _Stream(io.RawIOBase):
    """The bytes of a file, requested ahead while they are read in order."""

    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at = file, 0
        self._first, self._held = 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer but at the end of the file: a short read is the end to those that read it, such as pyarrow."""
        wanted = max(0, min(len(buffer), self._file.size - self._at))
        filled = 0
        while filled < wanted:
            self._hold(wanted - filled)
            begin = self._at - self._first
            found = self._held[begin : begin + wanted - filled]
            buffer[filled : filled + len(found)] = found
            filled, self._at = filled + len(found), self._at + len(found)
        return filled

    def _hold(self, wanted: int) -> None:
        """Request what comes next, unless some of it is held."""
        held_end = self._first + len(self._held)
        if not self._first <= self._at < held_end:
            ahead = PART_BYTES * PARTS // 2 if self._at == held_end else max(wanted, SOUGHT_BYTES)
            end = min(self._file.size, self._at + ahead)
            self._first, self._held = self._at, b"".join(parts_of(self._file, first=self._at, end=end))
