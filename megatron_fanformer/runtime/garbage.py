"""Garbage collection at moments when it delays no other rank."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_is_kept = False


def freeze_gc() -> None:
    """Collect, and have no later collection look through what stays: for a process that does one run after another.

    torch and megatron-core are half a second of each collection.
    """
    global _is_kept
    gc.collect()
    gc.freeze()
    _is_kept = True


@contextmanager
def manual_gc() -> Iterator[None]:
    """Turn automatic garbage collection off: ranks would each pause at a different moment, and wait for each other."""
    gc.collect()
    if not _is_kept:  # by whoever does several runs, and is not to have it undone
        gc.freeze()  # what exists now stays: not to be scanned each time
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        if not _is_kept:
            gc.unfreeze()
