"""The ids of token files, checked against the vocabulary: the file's smallest and largest, and those that are read.

A manifest records the largest one. Without a manifest, a file is read from end to end, several files at once; since
that may take an hour for the tokens of a large run, it is logged how far it is, and what was found in a large file is
remembered in the index cache, as long as its size and modification time stay the same. Neither a manifest nor such a
note notices a file that was overwritten since; so the ids of each sample are checked again where they are read, and
still in the processor's cache.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.data.file_tasks import Advance, FileTasks
from megatron_fanformer.data.notes import note_path, read_note, write_note
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.processes import usable_cores

UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
SCAN_TOKENS = 1 << 22
MOST_THREADS = 8
# Smaller files are read in a fraction of a second: not worth a note.
REMEMBERED_BYTES = 1 << 28


def refuse_ids_outside(
    vocab_size: int,
    name: str,
    file: Path,
    dtype: np.dtype[Any],
    *,
    largest: int | None,
    cache: Path | None,
    advance: Advance = lambda _bytes: None,
) -> None:
    """Raise InputError, naming `name`, if a file of token ids holds one outside [0, vocab_size).

    `largest` is what a manifest says; if it is None, the file is read, unless its type can hold no such id. `advance`
    is called with the bytes of each part that was read.
    """
    smallest = 0
    if largest is None:
        limits = np.iinfo(dtype)
        smallest, largest = int(limits.min), int(limits.max)
        if is_read(dtype, vocab_size):
            smallest, largest = _remembered_bounds(file, dtype, cache, advance)
    wrong = smallest if smallest < 0 else largest
    if not 0 <= wrong < vocab_size:
        raise InputError(
            f"{name} holds token id {wrong}, outside the vocabulary of {vocab_size};"
            " train with the tokenizer that made the tokens, or raise model.vocab_size"
        )


def is_read(dtype: np.dtype[Any], vocab_size: int) -> bool:
    """Return whether a file of that type without a manifest is read: whether it can hold an id outside."""
    return dtype.kind == "i" or bool(np.iinfo(dtype).max >= vocab_size)


def refuse_ids_read(
    ids: np.ndarray, vocab_size: int, file: Path | str, first: int, *, document: Callable[[], int] | None = None
) -> None:
    """Raise CorruptError, with the first of them and its place, if ids that were read are not below `vocab_size`.

    Under tensor parallelism nothing else would notice: each rank takes what is not in its part of the embedding for
    another's.

    Args:
        ids: [t] as they are stored.
        vocab_size: of the model.
        file: that they were read from.
        first: which of its tokens the first of them is, counted from 0.
        document: says which document they are in, where that is known.
    """
    unsigned = ids.view(UNSIGNED[ids.itemsize])  # a negative id is a large one
    if not len(ids) or unsigned.max() < vocab_size:
        return
    place = int(np.argmax(unsigned >= vocab_size))
    where = f"token {first + place:,}" + (f" of the file, in document {document():,}" if document else "")
    raise CorruptError(
        f"{file} holds token id {ids[place]} ({where}, counted from 0), outside the vocabulary of {vocab_size}; it is "
        "damaged, or not the file of its manifest: copy or prepare it again, and resume"
    )


def is_remembered(file: Path, dtype: np.dtype[Any], cache: Path) -> bool:
    """Return whether a file has been read for its largest id before, and need not be again."""
    return _noted_bounds(*_note_of(file, dtype, cache)) is not None


def _remembered_bounds(file: Path, dtype: np.dtype[Any], cache: Path | None, advance: Advance) -> tuple[int, int]:
    size = file.stat().st_size
    if cache is None or size < REMEMBERED_BYTES:
        return _read_bounds(file, dtype, advance)
    note, identity = _note_of(file, dtype, cache)
    if (bounds := _noted_bounds(note, identity)) is not None:
        return bounds  # nothing is read, and so `advance` is not called
    bounds = _read_bounds(file, dtype, advance)
    write_note(note, identity, {"smallest": bounds[0], "largest": bounds[1]})
    return bounds


def _note_of(file: Path, dtype: np.dtype[Any], cache: Path) -> tuple[Path, str]:
    stat = file.stat()
    identity = f"{file.absolute()} {stat.st_size} {stat.st_mtime_ns} {dtype.str}"
    return note_path(cache / "ids", identity), identity


def _noted_bounds(note: Path, identity: str) -> tuple[int, int] | None:
    found = read_note(note, identity) or {}
    bounds = found.get("smallest"), found.get("largest")
    return bounds if isinstance(bounds[0], int) and isinstance(bounds[1], int) else None  # type: ignore[return-value]


def _read_bounds(file: Path, dtype: np.dtype[Any], advance: Advance) -> tuple[int, int]:
    smallest, largest = 0, 0
    with file.open("rb") as stream:
        while len(block := np.fromfile(stream, dtype=dtype, count=SCAN_TOKENS)):
            largest = max(largest, int(block.max()))
            if dtype.kind == "i":
                smallest = min(smallest, int(block.min()))
            advance(block.nbytes)
    return smallest, largest


def scan_of(total_bytes: int) -> FileTasks:
    """Return what runs checks that may read so many bytes; NumPy lets several threads read at once."""
    message = "reading token files without a manifest for their largest id: %.0f%% of %.0f GB, %s left"
    return FileTasks(total_bytes, message, threads=min(usable_cores(), MOST_THREADS))
