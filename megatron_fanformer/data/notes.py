"""Notes in the index cache: what was found in a large file, which need not be read for it again while it stays."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

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
