"""How long a test waits for what must happen: only what never happens takes longer, however busy the machine is."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_SECONDS = 900.0

Found = TypeVar("Found")


def wait_until(condition: Callable[[], Found], seconds: float = PATIENCE_SECONDS) -> Found:
    """Return what a condition comes to, once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return found
