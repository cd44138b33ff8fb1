"""Repeats operations that failed at a store, and states the cause on one line."""

import errno
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from megatron_fanformer.errors import FanformerError, redacted

PAUSES_SECONDS: tuple[float, ...] = (1, 2, 4, 8, 16, 32)
"""Pauses before each further attempt at what a store refused."""
PATIENCE_SECONDS = 60.0
"""Time after which a waiting command stops trying: a driver may take minutes to report that nothing answers."""
_FULL = (errno.ENOSPC, errno.EDQUOT)

Result = TypeVar("Result")


def with_attempts(
    function: Callable[[], Result],
    report: Callable[[int, str], None],
    pauses: Sequence[float] = PAUSES_SECONDS,
    final: tuple[type[Exception], ...] = (FanformerError,),
    patience: float = float("inf"),
) -> Result:
    """Call a function that uses a store, and call it again after each of the pauses where it fails.

    A store that is full is not tried again: it fills nothing but the log.

    Args:
        report: is called with the number of each attempt that failed, and why.
        final: the errors that would come again, and are not waited for.
        patience: in seconds since the first attempt began; after it, none follows.

    Raises:
        Exception: the driver's own, of the last attempt.
    """
    end = time.monotonic() + patience
    for attempt, pause in enumerate((*pauses, None), 1):
        try:
            return function()
        except final:
            raise
        except Exception as error:  # drivers raise what they like
            report(attempt, reason_of(error))
            is_full = isinstance(error, OSError) and error.errno in _FULL
            if pause is None or is_full or time.monotonic() > end:
                raise
            time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def reason_of(error: Exception) -> str:
    """Return a driver's error on one line, without credentials."""
    text = " ".join(str(error).split()) or "no reason given"
    return redacted(f"{type(error).__name__}: {text}")[:300]
