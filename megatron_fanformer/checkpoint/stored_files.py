"""The files of a checkpoint: verification, and their plain values, read as data.

The manifest covers every byte. In a checkpoint from before its sums each tensor is a torch archive, which carries the
CRC-32 of its bytes.

Besides tensors there are a run's progress and each rank's random states. megatron-core 0.16 puts the values that are
the same on all ranks into `common.pt`, later ones among the tensors, where each rank's own always are. Reading them
needs only torch.
"""

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.data_files import (
    EARLIER,
    check_archive,
    load_data,
    read_entry,
    read_part,
    reporting_damage,
)
from megatron_fanformer.checkpoint.manifest import MANIFEST, check_files, read_manifest
from megatron_fanformer.checkpoint.tensor_table import Stored, Table, read_table, stored_parts, tensors_of
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import CorruptError

COMMON = "common.pt"
COMMON_STATE = "common_state/"
FORMAT = "torch_dist"  # of megatron-core; there are others

logger = logging.getLogger(__name__)


def read_checked(checkpoint: Path, *, share: int = 0, shares: int = 1) -> Table:
    """Return the table of a checkpoint whose files are as they were written, and hold nothing but data.

    Args:
        share, shares: every rank checks one of this many shares.

    Raises:
        CorruptError: a file has changed since it was written; or the table holds more than a table, or names files
            elsewhere.
    """
    check_stored(checkpoint, share=share, shares=shares)
    table = read_table(checkpoint)
    check_plain_values(checkpoint, table, share=share, shares=shares)
    return table


# -- whether they are as they were written


def check_stored(
    checkpoint: Path, *, share: int = 0, shares: int = 1, advance: Callable[[int], None] = lambda _bytes: None
) -> None:
    """Check the files of a checkpoint, and that it is of the step that its name states.

    Args:
        share, shares: every rank checks one of this many shares.
        advance: is called with the bytes of each piece that was read.

    Raises:
        CorruptError: a file is missing or damaged; names it.
    """
    manifest = read_manifest(checkpoint)
    if manifest is not None:
        if run_folder.step_of(checkpoint) not in (None, manifest.step):
            raise CorruptError(f"{checkpoint} is of step {manifest.step}, another than its name says; rename it")
        check_files(checkpoint, manifest, share=share, shares=shares, advance=advance)
    if manifest is None or not manifest.has_sums:
        if share == 0:
            logger.warning(
                "%s has no SHA-256 of its files (%s), as later versions write: its tensors are checked by their own "
                "CRC-32",
                checkpoint,
                MANIFEST,
            )
        _check_archives(checkpoint, share, shares, advance)


def bytes_stored(checkpoint: Path) -> int:
    """Return the bytes that `check_stored` will advance by."""
    manifest = read_manifest(checkpoint)
    total = 0 if manifest is None else sum(file.bytes for file in manifest.files.values())
    if manifest is None or not manifest.has_sums:
        total += sum(part.length for part in stored_parts(read_table(checkpoint)))
    return total


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
        with reporting_damage(path):
            check_archive(path, part.name, read_part(path, part.offset, part.length))
        advance(part.length)


# -- plain values


class SavedProgress(NamedTuple):
    """The progress that a run resumes from."""

    step: int
    consumed_samples: int
    data: Any = None
    """The data that it has been trained on (data/identity.py), as plain values; None in a checkpoint of an earlier
    version of this package."""
    sources: dict[str, dict[str, float]] | None = None
    """`tokens` and `epochs` of each source that were trained on, by name; None as above."""


def saved_progress(checkpoint: Path, table: Table) -> SavedProgress | None:
    """Return step and samples of a checkpoint with its `table`; None for converted weights.

    Raises:
        CorruptError: it cannot be read as data alone, or is not progress.
    """
    file, common = common_values(checkpoint, table)
    progress = common.get("progress") if isinstance(common, dict) else common
    if isinstance(common, dict) and not progress:
        return None
    values = progress if isinstance(progress, dict) else {}
    step, samples = values.get("step"), values.get("consumed_samples")
    if not isinstance(step, int) or not isinstance(samples, int):
        raise CorruptError(f"{checkpoint / file} holds no step and samples ({progress!r}); use another checkpoint")
    try:
        sources = msgspec.convert(values.get("sources"), dict[str, dict[str, float]] | None)
    except msgspec.ValidationError as error:
        raise CorruptError(
            f"{checkpoint / file} holds no counts of its sources ({error}); use another checkpoint"
        ) from None
    return SavedProgress(step, samples, values.get("data"), sources)


def common_values(checkpoint: Path, table: Table, read: Callable[[Any], Any] = load_data) -> tuple[str, Any]:
    """Return the file that the values which are the same on all ranks are in, and the values, as data alone.

    megatron-core has them in `common.pt`, from 0.19 on among the tensors.

    Args:
        read: `load_data`, or `read_records` for another program's values.

    Raises:
        CorruptError: they are missing, damaged, or more than data.
    """
    if (place := common_state(table)) is None:
        with reporting_damage(checkpoint / COMMON):
            return COMMON, read(regular_file(checkpoint / COMMON))
    with reporting_damage(checkpoint / place.file):
        (common,) = read(read_part(checkpoint / place.file, place.offset, place.length))
    return place.file, common


def common_state(table: Table) -> Stored | None:
    """Return where a table has the plain values; None where they are in `common.pt`."""
    return next((part for part in stored_parts(table) if part.name.startswith(COMMON_STATE)), None)


def check_format(checkpoint: Path) -> None:
    """Refuse a checkpoint whose `metadata.json` states another format of megatron-core's.

    Raises:
        CorruptError: it does, or cannot be read.
    """
    stated = run_folder.read_mapping(checkpoint / run_folder.MEGATRON_METADATA)
    if stated.get("sharded_backend") != FORMAT:
        raise CorruptError(f"{checkpoint / run_folder.MEGATRON_METADATA} does not state the format {FORMAT}; {EARLIER}")


def check_plain_values(checkpoint: Path, table: Table, *, share: int = 0, shares: int = 1) -> None:
    """Refuse a checkpoint that holds more than data besides its tensors, whether or not anything here reads it.

    Args:
        share, shares: every rank checks one of this many shares of the objects among the tensors.

    Raises:
        CorruptError: it does, or cannot be read; names the file.
    """
    check_format(checkpoint)
    if common_state(table) is None or (checkpoint / COMMON).exists():
        with reporting_damage(checkpoint / COMMON):
            load_data(regular_file(checkpoint / COMMON))
    tensors = tensors_of(table)
    others = [part for part in stored_parts(table) if part.name not in tensors]
    for part in others[share::shares]:
        read_entry(checkpoint / part.file, part.offset, part.length)
