"""The table of a checkpoint's tensors, `.metadata`, read as data: whatever else its pickle holds is refused.

torch and megatron-core would load that file as any pickle, which executes what it names: megatron_versions.py hands
them what was read here.
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
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

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


class _DataUnpickler(pickle.Unpickler):
    """Knows the records of a table, and nothing that executes anything."""

    def find_class(self, module: str, name: str) -> Any:
        module = MOVED.get(module, module)
        if (module, name) in VALUES:
            return getattr(importlib.import_module(module), name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if "." not in name and (module in RECORDS or module == "torch"):
            found = getattr(importlib.import_module(module), name, None)
            if isinstance(found, torch.dtype) or (isinstance(found, type) and _is_record(found, module)):
                return found
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


def _is_record(found: type, module: str) -> bool:
    return found.__module__ == module and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))


def read_table(checkpoint: Path) -> Table:
    """Return the table of a checkpoint's tensors.

    Raises:
        CorruptError: it cannot be read, holds more than a table, or names files outside the checkpoint's folder.
    """
    path = checkpoint / METADATA
    try:
        with regular_file(path).open("rb") as stream:
            table = _DataUnpickler(stream).load()
    except pickle.UnpicklingError as error:
        raise CorruptError(
            f"{path} holds more than a table of tensors, or is damaged ({error}); use another checkpoint, "
            "from a trusted source"
        ) from error
    except Exception as error:  # a damaged pickle raises anything
        raise UnreadableError(
            f"{path} cannot be read ({type(error).__name__}: {error}); use another checkpoint"
        ) from error
    if not _is_table(table):
        raise CorruptError(f"{path} holds no table of tensors; use an earlier checkpoint")
    for info in table.storage_data.values():
        file = info.relative_path
        if not isinstance(file, str) or Path(file).name != file or file in (".", ".."):
            raise CorruptError(f"{path} names {file!r}, which is not a file in its folder; use another checkpoint")
    return table


def _is_table(table: Any) -> bool:
    """Return whether its records are of the types that they should be of: a pickle puts anything into their fields."""
    return (
        isinstance(table, Metadata)
        and isinstance(table.storage_data, dict)
        and bool(table.storage_data)
        and all(map(_is_place, table.storage_data, table.storage_data.values()))
        and isinstance(table.state_dict_metadata, dict)
        and all(map(_is_described, table.state_dict_metadata, table.state_dict_metadata.values()))
    )


def _is_place(index: Any, info: Any) -> bool:
    numbers = (getattr(info, "offset", None), getattr(info, "length", None))
    return (
        isinstance(index, MetadataIndex)
        and isinstance(index.fqn, str)
        and hasattr(info, "relative_path")
        and all(isinstance(number, int) and number >= 0 for number in numbers)
    )


def _is_described(name: Any, value: Any) -> bool:
    if not isinstance(value, TensorStorageMetadata):
        return isinstance(name, str)
    return (
        isinstance(name, str)
        and isinstance(value.size, torch.Size)
        and isinstance(value.properties, TensorProperties)
        and isinstance(value.properties.dtype, torch.dtype)
        and isinstance(value.chunks, list)
        and all(isinstance(c, ChunkStorageMetadata) and isinstance(c.sizes, torch.Size) for c in value.chunks)
        and all(isinstance(c.offsets, torch.Size) and len(c.offsets) == len(value.size) for c in value.chunks)
    )


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
