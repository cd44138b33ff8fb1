"""Verifies a checkpoint: that it is complete and undamaged.

A checkpoint has no hashes of its own. But each tensor in it is a torch archive, and so carries the CRC-32 of its
bytes: with the table of tensors this shows damage, and what is missing. Only torch is needed.
"""

import io
from pathlib import Path

from megatron_fanformer.checkpoint import store
from megatron_fanformer.checkpoint.data_files import Section, damage_told
from megatron_fanformer.checkpoint.plain_values import COMMON, common_state
from megatron_fanformer.checkpoint.tensor_table import METADATA, Stored, Table, read_table, stored_parts, tensors_of
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.formats.name_table import expected_shapes
from megatron_fanformer.inspection.archive import check_archive
from megatron_fanformer.inspection.report import Advance, plural, size

READ_BYTES = 1 << 20


def bytes_to_check(checkpoint: Path) -> int:
    """Bytes that `check_checkpoint` will read."""
    return sum(part.length for part in stored_parts(read_table(checkpoint)))


def check_checkpoint(checkpoint: Path, advance: Advance) -> str:
    """Check that every tensor is complete, and the CRC-32 of all that is stored; returns what was checked.

    Raises:
        CorruptError: something is missing or damaged; names the file, and what.
    """
    table = read_table(checkpoint)
    _check_shapes(checkpoint, table)
    parts = list(stored_parts(table))
    if common_state(table) is None:
        with damage_told(checkpoint / COMMON), regular_file(checkpoint / COMMON).open("rb") as stream:
            check_archive(checkpoint / COMMON, "its plain values", stream)
    for part in parts:
        _check_part(checkpoint, part)
        advance(part.length)
    total = sum(part.length for part in parts)
    return f"CRC-32 of {plural(len(parts), 'stored part')}, {size(total)}; every tensor is complete"


def _check_shapes(checkpoint: Path, table: Table) -> None:
    """Check that the model's weights are all listed, and that the stored parts of each tensor are all of it."""
    tensors, config = tensors_of(table), store.saved_model(checkpoint)
    for name, shape in expected_shapes(config, "megatron").items():
        found = tuple(tensors[name].size) if name in tensors else None
        if found != shape:
            raise CorruptError(
                f"{checkpoint / METADATA} has {name} of shape {found or 'none'}, where the model in {store.CONFIG} has "
                f"{shape}; use another checkpoint"
            )
    for name, tensor in tensors.items():
        if sum(chunk.sizes.numel() for chunk in tensor.chunks) != tensor.size.numel():
            raise CorruptError(f"{checkpoint / METADATA} does not hold all of {name}; use another checkpoint")


def _check_part(checkpoint: Path, part: Stored) -> None:
    path = checkpoint / part.file
    with damage_told(path), regular_file(path).open("rb") as stream:
        if part.offset + part.length > path.stat().st_size:
            raise CorruptError(f"{path} ends before {part.name}; use another checkpoint")
        check_archive(path, part.name, io.BufferedReader(Section(stream, part.offset, part.length), READ_BYTES))
