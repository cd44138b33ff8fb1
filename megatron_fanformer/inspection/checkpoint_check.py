"""Verifies a checkpoint: that it is complete and undamaged. Only torch is needed."""

from pathlib import Path

from megatron_fanformer.checkpoint import store
from megatron_fanformer.checkpoint.manifest import read_manifest
from megatron_fanformer.checkpoint.stored_files import bytes_stored, check_stored
from megatron_fanformer.checkpoint.tensor_table import METADATA, Table, read_table, stored_parts, tensors_of
from megatron_fanformer.errors import CorruptError
from megatron_fanformer.formats.name_table import expected_shapes
from megatron_fanformer.inspection.report import Advance, plural, size


def check_checkpoint(checkpoint: Path, advance: Advance) -> str:
    """Check every file against the manifest, and that every tensor is complete; returns what was checked.

    Raises:
        CorruptError: something is missing or damaged; names the file, and what.
    """
    check_stored(checkpoint, advance=advance)
    table = read_table(checkpoint)
    _check_shapes(checkpoint, table)
    manifest = read_manifest(checkpoint)
    what = (
        plural(len(manifest.files), "file") if manifest else plural(sum(1 for _ in stored_parts(table)), "stored part")
    )
    return f"CRC-32 of {what}, {size(bytes_stored(checkpoint))}; every tensor is complete"


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
