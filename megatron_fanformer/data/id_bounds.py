"""The ids of token files, checked against the vocabulary: the file's smallest and largest, and those that are read.

A manifest records the largest one. Without a manifest, a file is read from end to end; since that may take an hour
for the tokens of a large run, what was found in a large file is remembered in the index cache, as long as its size and
modification time stay the same. Neither a manifest nor such a note notices a file that was overwritten since; so the
ids of each sample are checked again where they are read, and still in the processor's cache.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.errors import CorruptError, InputError

logger = logging.getLogger(__name__)

UNSIGNED = {size: np.dtype(f"u{size}") for size in (2, 4, 8)}
SCAN_TOKENS = 1 << 24
# Smaller files are read in a fraction of a second: not worth a note.
REMEMBERED_BYTES = 1 << 28


def refuse_ids_outside(
    vocab_size: int, name: str, file: Path, dtype: np.dtype[Any], *, largest: int | None, cache: Path | None
) -> None:
    """Raise InputError, naming `name`, if a file of token ids holds one outside [0, vocab_size).

    `largest` is what a manifest says; if it is None, the file is read, unless its type can hold no such id.
    """
    smallest = 0
    if largest is None:
        limits = np.iinfo(dtype)
        smallest, largest = int(limits.min), int(limits.max)
        if smallest < 0 or largest >= vocab_size:
            smallest, largest = _remembered_bounds(file, dtype, cache)
    wrong = smallest if smallest < 0 else largest
    if not 0 <= wrong < vocab_size:
        raise InputError(
            f"{name} holds token id {wrong}, outside the vocabulary of {vocab_size};"
            " train with the tokenizer that made the tokens, or raise model.vocab_size"
        )


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


def _remembered_bounds(file: Path, dtype: np.dtype[Any], cache: Path | None) -> tuple[int, int]:
    stat = file.stat()
    if cache is None or stat.st_size < REMEMBERED_BYTES:
        return _read_bounds(file, dtype)
    identity = f"{file.absolute()} {stat.st_size} {stat.st_mtime_ns} {dtype.str}"
    note = cache / "ids" / (hashlib.sha256(identity.encode()).hexdigest()[:32] + ".json")
    bounds = _read_note(note, identity)
    if bounds is None:
        logger.info("%s has no manifest: reading its %.1f GB for the largest token id", file, stat.st_size / 1e9)
        bounds = _read_bounds(file, dtype)
        _write_note(note, {"file": identity, "smallest": bounds[0], "largest": bounds[1]})
    return bounds


def _read_bounds(file: Path, dtype: np.dtype[Any]) -> tuple[int, int]:
    smallest, largest = 0, 0
    with file.open("rb") as stream:
        while len(block := np.fromfile(stream, dtype=dtype, count=SCAN_TOKENS)):
            smallest, largest = min(smallest, int(block.min())), max(largest, int(block.max()))
    return smallest, largest


def _read_note(note: Path, identity: str) -> tuple[int, int] | None:
    try:
        found = json.loads(note.read_bytes())
        return (int(found["smallest"]), int(found["largest"])) if found["file"] == identity else None
    except (OSError, ValueError, KeyError, TypeError):  # none, or torn
        return None


def _write_note(note: Path, found: dict[str, Any]) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(note, json.dumps(found))
    except OSError as error:  # read again next time
        logger.warning("%s cannot be written (%s); the next start reads the token file again", note, error.strerror)
