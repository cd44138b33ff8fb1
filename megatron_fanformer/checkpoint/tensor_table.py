"""The table of a checkpoint's tensors, `.metadata`, read as data: whatever else its pickle holds is refused.

torch and megatron-core would unpickle that file, which executes code: megatron_versions.py hands them the table read
here.
"""

import dataclasses
import enum
import importlib
import pickle
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import (
    Metadata,
    TensorStorageMetadata,
)

from megatron_fanformer.checkpoint.data_files import RestrictedUnpickler
from megatron_fanformer.checkpoint.versions import UnreadableError
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import CorruptError

METADATA = ".metadata"
STATE_PREFIX = "optimizer.state."  # of the optimizer's tensors, by their weights' names
MAIN_WEIGHT = f"{STATE_PREFIX}param."
EARLIER_MAIN_WEIGHT = f"{STATE_PREFIX}fp32_param."
"""The main weight's name in checkpoints of megatron-core's plain optimizer for bf16."""
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
"""Modules by the names that Python 3.13 alone has for them: torch's writer of whole tensors puts a path in a table."""


def _find(module: str, name: str) -> Any:
    """Return one of the records of a table, or a value in it: nothing that executes anything."""
    module = MOVED.get(module, module)
    if (module, name) in VALUES:
        return getattr(importlib.import_module(module), name)
    if (module, name) == ("builtins", "getattr"):
        return _member
    if "." not in name and (module in RECORDS or module == "torch"):
        value = getattr(importlib.import_module(module), name, None)
        if isinstance(value, torch.dtype) or (isinstance(value, type) and _is_record(value, module)):
            return value
    raise pickle.UnpicklingError(f"{module}.{name}")


def _member(owner: Any, name: Any) -> enum.Enum:
    """Return a member of an enumeration of `RECORDS`: Python 3.11.2, among others, pickles it as `getattr` of the
    two.
    """
    if isinstance(owner, type) and issubclass(owner, enum.Enum) and owner.__module__ in RECORDS:
        for member in owner:
            if member.name == name:
                return member
    raise pickle.UnpicklingError("builtins.getattr")


def _is_record(value: type, module: str) -> bool:
    return value.__module__ == module and (dataclasses.is_dataclass(value) or issubclass(value, enum.Enum))


def read_table(checkpoint: Path) -> Table:
    """Return the table of a checkpoint's tensors.

    Raises:
        CorruptError: it cannot be read, holds more than a table, or names files outside the checkpoint's folder.
    """
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


def stored_parts(table: Table) -> Iterator[Stored]:
    """Return every part of every tensor or object, file by file in the order of their bytes."""
    parts = [
        Stored(index.fqn, info.relative_path, info.offset, info.length) for index, info in table.storage_data.items()
    ]
    yield from sorted(parts, key=lambda part: (part.file, part.offset))


def tensors_of(table: Table) -> dict[str, TensorStorageMetadata]:
    """Return the tensors in a table, by name."""
    return {
        name: value for name, value in table.state_dict_metadata.items() if isinstance(value, TensorStorageMetadata)
    }


def main_weight_name(weight: str, stored: Collection[str]) -> str:
    """Return the name of a weight's float32 main weight among those stored; the weight's own where there is none."""
    return next((name for name in (MAIN_WEIGHT + weight, EARLIER_MAIN_WEIGHT + weight) if name in stored), weight)
