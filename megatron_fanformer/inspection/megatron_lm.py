"""What a checkpoint of Megatron-LM is, in short: what it holds is told by its conversion."""

from megatron_fanformer.checkpoint.stored_files import check_parts
from megatron_fanformer.checkpoint.tensor_table import read_table, stored_parts, tensors_of
from megatron_fanformer.formats.recognition import Target, iteration_of
from megatron_fanformer.inspection.report import Advance, Report, plural, size


def describe_megatron_lm(target: Target) -> Report:
    """The checkpoint that is meant, and how many tensors it has.

    Raises:
        InputError: it is in a format that is not read.
        CorruptError: its table cannot be read.
    """
    folder = iteration_of(target)
    tensors, total = len(tensors_of(read_table(folder))), bytes_to_check(target)
    facts = {"kind": target.kind, "path": str(folder), "tensors": tensors, "bytes": total}
    rows = [
        ("stored", f"{plural(tensors, 'tensor')}, those of the optimizer included; torch_dist, {size(total)}"),
        ("to use it", f"megatron-fanformer convert {folder} DESTINATION --to megatron"),
    ]
    return Report(f"{folder}: checkpoint of Megatron-LM", facts, rows)


def bytes_to_check(target: Target) -> int:
    """Bytes that `check_megatron_lm` will read."""
    return sum(part.length for part in stored_parts(read_table(iteration_of(target))))


def check_megatron_lm(target: Target, advance: Advance) -> str:
    """Check every stored tensor and object by its own CRC-32; returns what was checked.

    Raises:
        CorruptError: one is missing or damaged; names its file.
    """
    folder = iteration_of(target)
    parts = list(stored_parts(read_table(folder)))
    check_parts(folder, parts, advance)
    return f"CRC-32 of {plural(len(parts), 'stored part')}"
