"""How long a test waits for what must happen: only what never happens takes longer, however busy the machine is."""

import subprocess
import time
from collections.abc import Callable
from typing import Any

PATIENCE_SECONDS = 900.0


def wait_until(is_so: Callable[[], object], process: "subprocess.Popen[Any] | None" = None) -> None:
    """Wait for a condition, which a process must not end before."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
