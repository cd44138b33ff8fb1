"""How long a test waits for what must happen: only what never happens takes longer, however busy the machine is."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

PATIENCE_SECONDS = 900.0

Found = TypeVar("Found")


def wait_until(
    condition: Callable[[], Found],
    process: "subprocess.Popen[Any] | None" = None,
    *,
    seconds: float = PATIENCE_SECONDS,
) -> Found:
    """Return what a condition comes to, once that is true; a process must not end before."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)
    return found


def is_running(pid: int) -> bool:
    """Return whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
