"""Notes in the index cache: what was found in a large file, which need not be read for it again while it stays."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_fanformer.data.remote_files import Range, RemoteFile, read_ranges
from megatron_fanformer.durable_files import write_atomically

logger = logging.getLogger(__name__)


def note_path(folder: Path, identity: str) -> Path:
    """Return the path of the note of a file that is known by `identity`: its place, size and version."""
    return folder / (hashlib.sha256(identity.encode()).hexdigest()[:32] + ".json")


def read_note(note: Path, identity: str) -> dict[str, Any] | None:
    """Return what was noted of a file; None where there is no note, or one that is torn or another file's."""
    try:
        found = json.loads(note.read_bytes())
        return dict(found) if found["file"] == identity else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_note(note: Path, identity: str, found: dict[str, Any]) -> None:
    """Note what was found in a file; where that fails, it is logged, and the next start reads the file again."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(note, json.dumps({"file": identity, **found}))
    except OSError as error:
        logger.warning("%s cannot be written (%s); the next start reads the token file again", note, error.strerror)


# -- files on other stores


def first_bytes(files: Sequence[RemoteFile], count: int, cache: Path | None) -> dict[str, bytes]:
    """Return the first bytes of files by URL, at most `count`; remembered in the folder `cache`."""
    return {
        file.url: bytes.fromhex(found)
        for file, found in zip(
            files, remembered(files, "begins", lambda left: _begins(left, count), cache), strict=True
        )
    }


def _begins(files: Sequence[RemoteFile], count: int) -> list[str]:
    return [content.hex() for content in read_ranges([Range(file, 0, min(count, file.size)) for file in files])]


def remembered(
    files: Sequence[RemoteFile], name: str, compute: Callable[[Sequence[RemoteFile]], list[str]], cache: Path | None
) -> list[str]:
    """Return a text for each file: from its note in the folder `cache`, else computed, and noted there.

    A file of no stated version is not remembered.
    """
    found: dict[RemoteFile, str] = {}
    for file in files if cache is not None else ():
        noted = (read_note(_note_of(file, cache), file.identity) or {}).get(name) if file.version else None
        if isinstance(noted, str):
            found[file] = noted
    left = [file for file in dict.fromkeys(files) if file not in found]
    for file, text in zip(left, compute(left) if left else [], strict=True):
        found[file] = text
        if cache is not None and file.version:
            note = _note_of(file, cache)
            write_note(note, file.identity, {**(read_note(note, file.identity) or {}), name: text})
    return [found[file] for file in files]


def _note_of(file: RemoteFile, cache: Path | None) -> Path:
    assert cache is not None
    return note_path(cache / "remote", file.identity)
