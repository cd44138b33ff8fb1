"""The descriptors of the files that this process reads here and there: kept open, the least recently used closed first.

A run may have thousands of files, a process by default a thousand descriptors. The limit is raised as far as the system
allows, and half of it is left to others.
"""

import errno
import os
import resource
from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path

from megatron_fanformer.errors import InputError

MOST_OPEN = 1 << 14
LEAST_OPEN = 16
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


class OpenFiles:
    """Descriptors by key. Not for several threads: one would close what another reads."""

    def __init__(self) -> None:
        self._descriptors: OrderedDict[Hashable, int] = OrderedDict()
        self._most: int | None = None

    def of(self, key: Hashable, path: Path) -> tuple[int, bool]:
        """Return the descriptor of a file, and whether it was opened for this; it is valid until the next call.

        Raises:
            InputError: the process has no descriptor left.
            OSError: the file cannot be opened.
        """
        if (descriptor := self._descriptors.get(key)) is not None:
            self._descriptors.move_to_end(key)
            return descriptor, False
        if self._most is None:
            self._most = max(LEAST_OPEN, min(MOST_OPEN, raised_limit() // 2))
        while len(self._descriptors) >= self._most:
            self._close_oldest()
        while True:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                break
            except OSError as error:
                if error.errno not in NO_DESCRIPTOR:
                    raise
                if not self._descriptors:
                    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                    of_process = f"this process may have {limit} files open, and no more; raise the limit (ulimit -Hn)"
                    of_system = "all processes together have too many files open; raise fs.file-max"
                    reason = of_system if error.errno == errno.ENFILE else of_process
                    raise InputError(f"{path} cannot be opened: {reason}") from error
                self._close_oldest()
        self._descriptors[key] = descriptor
        return descriptor, True

    def close(self, key: Hashable) -> None:
        """Close one, if it is open."""
        if (descriptor := self._descriptors.pop(key, None)) is not None:
            os.close(descriptor)

    def _close_oldest(self) -> None:
        os.close(self._descriptors.popitem(last=False)[1])

    def __len__(self) -> int:
        return len(self._descriptors)


def raised_limit() -> int:
    """Raise the number of files that this process may have open as far as it is of use, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited, wanted = resource.RLIM_INFINITY, 2 * MOST_OPEN
    if soft == unlimited or soft >= wanted:
        return wanted
    wanted = wanted if hard == unlimited else min(wanted, hard)  # children inherit it; some go through all descriptors
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # some systems allow less than they say
        return soft
    return wanted


OPEN = OpenFiles()
"""Those of this process. A forked one has its own table of the same descriptors, which share no position."""
