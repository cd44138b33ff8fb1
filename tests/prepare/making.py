"""Makes documents and token files for the tests of the data room."""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron_fanformer.prepare.pipeline import ProgressListener
from megatron_fanformer.prepare.prepare import PrepareReport, prepare
from megatron_fanformer.prepare.verb import PrepareConfig


def as_line(text: str) -> bytes:
    """A Dolma document of one text, without its line end."""
    return json.dumps({"id": "1", "text": text, "source": "test"}).encode()


def prepare_files(
    prefix: str, files: list[Path], tokenizer: Path, *, progress: ProgressListener | None = None, **settings: Any
) -> PrepareReport:
    """Prepare `files` to `prefix`, with one worker unless the settings say otherwise."""
    settings = {"workers": 1, **settings}
    inputs = tuple(map(str, files))
    return prepare(PrepareConfig(inputs=inputs, output=prefix, tokenizer=str(tokenizer), **settings), progress)


Prepare = Callable[..., PrepareReport]
WriteLines = Callable[[str, Iterable[bytes]], Path]


def hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
