"""Whether the files of a checkpoint are as they were written: what every reader asks before it uses them.

By the manifest, which covers every byte. A checkpoint from before there were manifests is checked by what it has: each
tensor in it is a torch archive, and so carries the CRC-32 of its bytes.
"""

import io
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from megatron_fanformer.checkpoint.data_files import Section, check_archive, reporting_damage
from megatron_fanformer.checkpoint.manifest import MANIFEST, READ_BYTES, check_files, read_manifest
from megatron_fanformer.checkpoint.plain_values import COMMON, common_state
from megatron_fanformer.checkpoint.store import step_of
from megatron_fanformer.checkpoint.tensor_table import Stored, read_table, stored_parts
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import CorruptError

logger = logging.getLogger(__name__)


def check_stored(
    checkpoint: Path, *, share: int = 0, shares: int = 1, advance: Callable[[int], None] = lambda _bytes: None
) -> None:
    """Check the files of a checkpoint, and that it is of the step that its name states.

    Args:
        share, shares: every rank checks one of this many shares.
        advance: is told the bytes that were read, as they are.

    Raises:
        CorruptError: a file is missing or damaged; names it.
    """
    manifest = read_manifest(checkpoint)
    if manifest is None:
        if share == 0:
            logger.warning(
                "%s has no %s, which later versions write: its tensors are checked by their own CRC-32",
                checkpoint,
                MANIFEST,
            )
        _check_archives(checkpoint, share, shares, advance)
        return
    if step_of(checkpoint) not in (None, manifest.step):
        raise CorruptError(f"{checkpoint} is of step {manifest.step}, another than its name says; rename it")
    check_files(checkpoint, manifest, share=share, shares=shares, advance=advance)


def bytes_stored(checkpoint: Path) -> int:
    """Bytes that `check_stored` will read."""
    manifest = read_manifest(checkpoint)
    if manifest is not None:
        return sum(file.bytes for file in manifest.files.values())
    return sum(part.length for part in stored_parts(read_table(checkpoint)))


def _check_archives(checkpoint: Path, share: int, shares: int, advance: Callable[[int], None]) -> None:
    table = read_table(checkpoint)
    if common_state(table) is None and share == 0:
        with reporting_damage(checkpoint / COMMON), regular_file(checkpoint / COMMON).open("rb") as stream:
            check_archive(checkpoint / COMMON, "its plain values", stream)
    check_parts(checkpoint, list(stored_parts(table))[share::shares], advance)


def check_parts(
    checkpoint: Path, parts: Iterable[Stored], advance: Callable[[int], None] = lambda _bytes: None
) -> None:
    """Check parts of tensors and objects by their own CRC-32.

    Raises:
        CorruptError: one is missing or damaged; names its file.
    """
    for part in parts:
        path = checkpoint / part.file
        with reporting_damage(path), regular_file(path).open("rb") as stream:
            if part.offset + part.length > path.stat().st_size:
                raise CorruptError(f"{path} ends before {part.name}; use another checkpoint")
            check_archive(path, part.name, io.BufferedReader(Section(stream, part.offset, part.length), READ_BYTES))
        advance(part.length)
