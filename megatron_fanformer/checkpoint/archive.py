"""The checksum that weights carry by themselves: the CRC-32 of each record of a torch archive, which is a zip file."""

import zipfile
from pathlib import Path
from typing import Any

from megatron_fanformer.errors import CorruptError


def check_archive(path: Path, name: str, stream: Any) -> None:
    """Read the archive in `stream` through; `path` and `name` say where it is and what it holds.

    Raises:
        CorruptError: it is not a complete archive, or a record has changed since it was written.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, ValueError) as error:
        raise CorruptError(f"{path} is damaged in {name} ({error}); copy it again, or use another") from error
    if damaged is not None:
        raise CorruptError(f"{path} is damaged in {name} (CRC-32 of {damaged}); copy it again, or use another")
