"""Makes documents and token files for the tests of the data room."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron_fanformer.prepare.prepare import PrepareReport, prepare
from megatron_fanformer.prepare.progress import ProgressListener
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
