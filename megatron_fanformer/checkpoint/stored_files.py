"""The files of a checkpoint, read as data: the table of tensors, the plain values, and the verification of both.

    .metadata        the table: the file and the range of bytes of each part of each tensor or object
    *.distcp         the parts, each a torch archive
    common.pt        plain values, equal on all ranks; megatron-core 0.19 stores them as an object in the table instead
    manifest.json    the SHA-256 of every file (manifest.py)

torch and megatron-core would unpickle the table, which may execute code. Therefore `read_table` reads it here, without
megatron-core, and megatron_versions.py passes it to them.

Ranks divide a verification: of `shares` ranks, number `share` checks every `shares`-th file or object.
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
COMMON_STATE = "common_state/"  # prefix of the object that holds the plain values
FORMAT = "torch_dist"  # the only one of megatron-core's formats that is read here
METADATA = ".metadata"
STATE_PREFIX = "optimizer.state."  # a tensor of the optimizer: optimizer.state.STATE.WEIGHT
MAIN_WEIGHT = f"{STATE_PREFIX}param."
Table: TypeAlias = Metadata

# A table may hold data classes and enumerations of the modules in RECORDS, and the classes and functions in VALUES.
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
"""By Python 3.13's name of a module, the name in other versions; `write_full_tensors` leaves paths in a table."""

# -- the table


def _find(module: str, name: str) -> Any:
    """Return a class, function or value that a table may hold, and that executes nothing; refuse every other name."""
    module = MOVED.get(module, module)
    if (module, name) in VALUES:
        return getattr(importlib.import_module(module), name)
    if (module, name) == ("builtins", "getattr"):
        return _member
    if "." not in name and (module in RECORDS or module == "torch"):  # no attributes of classes
        value = getattr(importlib.import_module(module), name, None)
        if isinstance(value, torch.dtype):
            return value
        is_record = dataclasses.is_dataclass(value) or (isinstance(value, type) and issubclass(value, enum.Enum))
        if is_record and value.__module__ == module:
            return value
    raise pickle.UnpicklingError(f"{module}.{name}")


def _member(owner: Any, name: Any) -> enum.Enum:
    """Stand for `getattr`, by which Python 3.11.2 pickles an enumeration's member: return a member from `RECORDS`."""
    if isinstance(owner, type) and issubclass(owner, enum.Enum) and owner.__module__ in RECORDS:
        for member in owner:
            if member.name == name:
                return member
    raise pickle.UnpicklingError("builtins.getattr")


def read_table(checkpoint: Path) -> Table:
    """Read a checkpoint's table; raise CorruptError if it is damaged, has more than data, or names files elsewhere."""
    path = checkpoint / METADATA
    # A damaged pickle raises exceptions of every kind.
    with reporting_damage(path, also=(Exception,)), regular_file(path).open("rb") as stream:
        table = RestrictedUnpickler(stream, _find).load()
        _check_table(table)
    for info in table.storage_data.values():
        file = info.relative_path
        if not isinstance(file, str) or Path(file).name != file or file in (".", ".."):
            raise CorruptError(f"{path} names {file!r}, which is not a file in its folder; use another checkpoint")
    return table


def _check_table(table: Any) -> None:
    """Raise an exception of any kind if an object is not a table of tensors, or has an impossible entry."""
    is_sound = isinstance(table, Metadata) and bool(table.storage_data)
    for index, info in table.storage_data.items():
        is_sound &= isinstance(index.fqn, str) and min(info.offset, info.length) >= 0
    for name, value in table.state_dict_metadata.items():
        is_sound &= isinstance(name, str)
        if isinstance(value, TensorStorageMetadata):
            whole = torch.empty(value.size, dtype=value.properties.dtype, device="meta")  # fails for a bad size or type
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
    """Return the locations of all tensors' parts and of all objects, sorted by file and offset."""
    parts = [
        Stored(index.fqn, info.relative_path, info.offset, info.length) for index, info in table.storage_data.items()
    ]
    return sorted(parts, key=lambda part: (part.file, part.offset))


def tensors_of(table: Table) -> dict[str, TensorStorageMetadata]:
    """Return the tensors in a table, by name."""
    return {
        name: value for name, value in table.state_dict_metadata.items() if isinstance(value, TensorStorageMetadata)
    }


def main_weight_name(weight: str, stored_names: Collection[str]) -> str:
    """Return the name of a weight's float32 values: the main weight's if one is stored, or else the weight's own."""
    return MAIN_WEIGHT + weight if MAIN_WEIGHT + weight in stored_names else weight


# -- verification


def read_checked(checkpoint: Path, *, share: int = 0, shares: int = 1) -> Table:
    """Return a checkpoint's table; raise CorruptError if a file is missing or damaged, or holds more than data."""
    check_stored(checkpoint, share=share, shares=shares)
    table = read_table(checkpoint)
    check_plain_values(checkpoint, table, share=share, shares=shares)
    return table


def check_stored(checkpoint: Path, *, share: int = 0, shares: int = 1) -> None:
    """Raise CorruptError if a file differs from the checkpoint's manifest, or the folder's name states another step."""
    manifest = read_manifest(checkpoint)
    if run_folder.step_of(checkpoint) not in (None, manifest.step):
        raise CorruptError(f"{checkpoint} is of step {manifest.step}, another than its name says; rename it")
    check_files(checkpoint, manifest, share=share, shares=shares)


def check_parts(checkpoint: Path, parts: Iterable[Stored]) -> None:
    """Raise CorruptError if a part's archive has a wrong CRC-32; this checks a checkpoint without a manifest."""
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
    """Raise CorruptError if the plain values or an object in a checkpoint, even an unused one, are more than data."""
    check_format(checkpoint)
    if common_state(table) is None or (checkpoint / COMMON).exists():  # otherwise an object holds the plain values
        with reporting_damage(checkpoint / COMMON):
            load_data(regular_file(checkpoint / COMMON))  # only to find more than data in it
    tensors = tensors_of(table)
    objects = [part for part in stored_parts(table) if part.name not in tensors]
    for part in objects[share::shares]:
        read_entry(checkpoint / part.file, part.offset, part.length)  # only to find more than data in it


# -- plain values


class SavedProgress(NamedTuple):
    """The progress that a run resumes from."""

    step: int
    consumed_samples: int
    data: Any = None
    """The fingerprint of the training data (data/fingerprint.py), as plain values."""
    sources: dict[str, dict[str, float]] | None = None
    """For each source of data, by name: the `tokens` and `epochs` that the run has trained on."""


def saved_progress(checkpoint: Path, table: Table) -> SavedProgress | None:
    """Return the progress in a checkpoint; None for converted weights, CorruptError if it has no step or samples."""
    file, common = common_values(checkpoint, table)
    if isinstance(common, dict) and not common.get("progress"):
        return None
    progress = common["progress"] if isinstance(common, dict) else common  # else damaged: the message shows it
    values = progress if isinstance(progress, dict) else {}
    step, samples = values.get("step"), values.get("consumed_samples")
    if not isinstance(step, int) or not isinstance(samples, int):
        raise CorruptError(f"{checkpoint / file} holds no step and samples ({progress!r}); use another checkpoint")
    return SavedProgress(step, samples, values.get("data"), values.get("sources"))


def common_values(checkpoint: Path, table: Table, read: Callable[[Any], Any] = load_data) -> tuple[str, Any]:
    """Return the name of the file with a checkpoint's plain values, and the values, parsed by `read`."""
    if (place := common_state(table)) is None:
        with reporting_damage(checkpoint / COMMON):
            return COMMON, read(regular_file(checkpoint / COMMON))
    with reporting_damage(checkpoint / place.file):
        (common,) = read(read_part(checkpoint / place.file, place.offset, place.length))  # a list of one
    return place.file, common


def common_state(table: Table) -> Stored | None:
    """Return the location of the object that holds the plain values; None if they are in `common.pt`."""
    return next((part for part in stored_parts(table) if part.name.startswith(COMMON_STATE)), None)
