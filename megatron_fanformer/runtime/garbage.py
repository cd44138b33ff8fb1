"""When Python collects its garbage: where that holds up nobody."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_by_hand() -> Iterator[None]:
    """No automatic garbage collection: ranks would each pause at a different moment, and wait for each other."""
    gc.collect()
    is_frozen = gc.get_freeze_count() > 0  # by whoever runs several, and is not to have it undone
    if not is_frozen:
        gc.freeze()  # what exists now stays: not to be scanned each time
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not is_frozen:
            gc.unfreeze()
