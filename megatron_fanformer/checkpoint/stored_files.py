"""The files of a checkpoint, read as data: its table of tensors, its plain values, and the verification of both.

    .metadata        the table: the files and ranges of bytes in which the parts of each tensor are stored
    *.distcp         the parts of tensors, each a torch archive
    common.pt        values that are the same on all ranks; from megatron-core 0.19 on they are among the tensors
    manifest.json    the sum of every file (manifest.py)

torch and megatron-core would unpickle the table, which may execute code: megatron_versions.py hands them the table that
was read here. Reading needs only torch.
"""

import dataclasses
import enum
import importlib
import pickle
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.data_files import (
    EARLIER,
    RestrictedUnpickler,
    UnreadableError,
    check_archive,
    load_data,
    read_entry,
    read_part,
    reporting_damage,
)
from megatron_fanformer.checkpoint.manifest import check_files, read_manifest
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import CorruptError

COMMON = "common.pt"
COMMON_STATE = "common_state/"
FORMAT = "torch_dist"  # of megatron-core, which has others
METADATA = ".metadata"
STATE_PREFIX = "optimizer.state."  # of the optimizer's tensors, before their weights' names
MAIN_WEIGHT = f"{STATE_PREFIX}param."
Table: TypeAlias = Metadata

# Modules whose plain records (data classes, enumerations) a table may hold. The last is megatron-core's.
RECORDS = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.planner",
    "torch.distributed.checkpoint.filesystem",
    "megatron.core.dist_checkpointing.strategies.torch",
)
VALUES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
}
MOVED = {"pathlib._local": "pathlib"}
"""Modules that Python 3.13 pickles under another name: torch's writer of whole tensors puts a path in a table."""

# -- the table


def _find(module: str, name: str) -> Any:
    """Return a class or value that a table may hold; nothing that it returns executes anything."""
    module = MOVED.get(module, module)
    if (module, name) in VALUES:
        return getattr(importlib.import_module(module), name)
    if (module, name) == ("builtins", "getattr"):
        return _member
    if "." not in name and (module in RECORDS or module == "torch"):
        value = getattr(importlib.import_module(module), name, None)
        if isinstance(value, torch.dtype):
            return value
        is_record = dataclasses.is_dataclass(value) or (isinstance(value, type) and issubclass(value, enum.Enum))
        if is_record and value.__module__ == module:
            return value
    raise pickle.UnpicklingError(f"{module}.{name}")


def _member(owner: Any, name: Any) -> enum.Enum:
    """Return a member of an enumeration of `RECORDS`, which some Pythons (3.11.2) pickle as a `getattr`."""
    if isinstance(owner, type) and issubclass(owner, enum.Enum) and owner.__module__ in RECORDS:
        for member in owner:
            if member.name == name:
                return member
    raise pickle.UnpicklingError("builtins.getattr")


def read_table(checkpoint: Path) -> Table:
    """Return the table of a checkpoint's tensors; CorruptError where it is more, or names files outside its folder."""
    path = checkpoint / METADATA
    try:
        with regular_file(path).open("rb") as stream:
            table = RestrictedUnpickler(stream, _find).load()
        _check_table(table)
    except pickle.UnpicklingError as error:
        raise CorruptError(
            f"{path} holds more than a table of tensors, or is damaged ({error}); use another checkpoint, "
            "from a trusted source"
        ) from error
    except Exception as error:  # a damaged pickle raises anything
        raise UnreadableError(
            f"{path} cannot be read ({type(error).__name__}: {error}); use another checkpoint"
        ) from error
    for info in table.storage_data.values():
        file = info.relative_path
        if not isinstance(file, str) or Path(file).name != file or file in (".", ".."):
            raise CorruptError(f"{path} names {file!r}, which is not a file in its folder; use another checkpoint")
    return table


def _check_table(table: Any) -> None:
    """Raise any exception for an object that is not a table of tensors."""
    is_sound = isinstance(table, Metadata) and bool(table.storage_data)
    for index, info in table.storage_data.items():
        is_sound &= isinstance(index.fqn, str) and min(info.offset, info.length) >= 0
    for name, value in table.state_dict_metadata.items():
        is_sound &= isinstance(name, str)
        if isinstance(value, TensorStorageMetadata):
            whole = torch.empty(value.size, dtype=value.properties.dtype, device="meta")
            is_sound &= all(isinstance(chunk.sizes, torch.Size) for chunk in value.chunks)
            is_sound &= all(len(chunk.offsets) == len(chunk.sizes) == whole.dim() for chunk in value.chunks)
    if not is_sound:
        raise ValueError("it is no table of tensors")


class Stored(NamedTuple):
    """The location of one part of a tensor, or of an object."""

    name: str
    file: str
    offset: int
    length: int


def stored_parts(table: Table) -> list[Stored]:
    """Return every part of every tensor or object, file by file in the order of their bytes."""
    parts = [
        Stored(index.fqn, info.relative_path, info.offset, info.length) for index, info in table.storage_data.items()
    ]
    return sorted(parts, key=lambda part: (part.file, part.offset))


def tensors_of(table: Table) -> dict[str, TensorStorageMetadata]:
    """Return the tensors in a table, by name."""
    return {
        name: value for name, value in table.state_dict_metadata.items() if isinstance(value, TensorStorageMetadata)
    }


def main_weight_name(weight: str, stored: Collection[str]) -> str:
    """Return the name under which a weight's float32 values are stored: its main weight's if there is one."""
    return MAIN_WEIGHT + weight if MAIN_WEIGHT + weight in stored else weight


# -- verification


def read_checked(checkpoint: Path, *, share: int = 0, shares: int = 1) -> Table:
    """Verify a checkpoint, each rank one of so many shares of its files, and return its table.

    CorruptError where a file has changed, or holds more than data, or the table names files elsewhere.
    """
    check_stored(checkpoint, share=share, shares=shares)
    table = read_table(checkpoint)
    check_plain_values(checkpoint, table, share=share, shares=shares)
    return table


def check_stored(checkpoint: Path, *, share: int = 0, shares: int = 1) -> None:
    """Check the sums of a checkpoint's files, and that its step is the one in its name; CorruptError names a file."""
    manifest = read_manifest(checkpoint)
    if run_folder.step_of(checkpoint) not in (None, manifest.step):
        raise CorruptError(f"{checkpoint} is of step {manifest.step}, another than its name says; rename it")
    check_files(checkpoint, manifest, share=share, shares=shares)


def check_parts(checkpoint: Path, parts: Iterable[Stored]) -> None:
    """Check parts of tensors and objects by their own CRC-32, where there is no manifest; CorruptError names a file."""
    for part in parts:
        path = checkpoint / part.file
        with reporting_damage(path):
            check_archive(path, part.name, read_part(path, part.offset, part.length))


def check_format(checkpoint: Path) -> None:
    """Raise CorruptError unless the `metadata.json` of a checkpoint states megatron-core's format `torch_dist`."""
    stated = run_folder.read_mapping(checkpoint / run_folder.MEGATRON_METADATA)
    if stated.get("sharded_backend") != FORMAT:
        raise CorruptError(f"{checkpoint / run_folder.MEGATRON_METADATA} does not state the format {FORMAT}; {EARLIER}")


def check_plain_values(checkpoint: Path, table: Table, *, share: int = 0, shares: int = 1) -> None:
    """Raise CorruptError unless everything in a checkpoint besides its tensors is data, also what nothing here reads.

    The objects among the tensors are checked in shares, as the files in `read_checked`.
    """
    check_format(checkpoint)
    if common_state(table) is None or (checkpoint / COMMON).exists():
        with reporting_damage(checkpoint / COMMON):
            load_data(regular_file(checkpoint / COMMON))
    tensors = tensors_of(table)
    objects = [part for part in stored_parts(table) if part.name not in tensors]
    for part in objects[share::shares]:
        read_entry(checkpoint / part.file, part.offset, part.length)


# -- plain values


class SavedProgress(NamedTuple):
    """The progress that a run resumes from."""

    step: int
    consumed_samples: int
    data: Any = None
    """The data that it has been trained on (data/fingerprint.py), as plain values."""
    sources: dict[str, dict[str, float]] | None = None
    """`tokens` and `epochs` of each source that were trained on, by name."""


def saved_progress(checkpoint: Path, table: Table) -> SavedProgress | None:
    """Return the progress stored in a checkpoint, None for converted weights; CorruptError for anything else."""
    file, common = common_values(checkpoint, table)
    progress = common.get("progress") if isinstance(common, dict) else common
    if isinstance(common, dict) and not progress:
        return None
    values = progress if isinstance(progress, dict) else {}
    step, samples = values.get("step"), values.get("consumed_samples")
    if not isinstance(step, int) or not isinstance(samples, int):
        raise CorruptError(f"{checkpoint / file} holds no step and samples ({progress!r}); use another checkpoint")
    return SavedProgress(step, samples, values.get("data"), values.get("sources"))


def common_values(checkpoint: Path, table: Table, read: Callable[[Any], Any] = load_data) -> tuple[str, Any]:
    """Return the values that are the same on all ranks, as data alone, after the name of their file.

    `read` is `load_data`, or `read_records` for another program's values.
    """
    if (place := common_state(table)) is None:
        with reporting_damage(checkpoint / COMMON):
            return COMMON, read(regular_file(checkpoint / COMMON))
    with reporting_damage(checkpoint / place.file):
        (common,) = read(read_part(checkpoint / place.file, place.offset, place.length))
    return place.file, common


def common_state(table: Table) -> Stored | None:
    """Return the place of the plain values among the tensors; None where they are in `common.pt`."""
    return next((part for part in stored_parts(table) if part.name.startswith(COMMON_STATE)), None)
