"""Reading and writing of a checkpoint's weights as whole tensors, for conversion; one is in memory at a time.

Tensors have the names that they have in the whole model. No ranks are needed: one process reads the files of all ranks,
and torch's writer makes one file per tensor. Both versions of megatron-core load these files.
"""

import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.data_files import read_entry
from megatron_fanformer.checkpoint.stored_files import (
    COMMON,
    METADATA,
    Table,
    main_weight_name,
    read_checked,
    tensors_of,
)
from megatron_fanformer.errors import CorruptError, FanformerError

OPTIMIZER_PREFIX = "optimizer."
# The content of metadata.json by megatron-core 0.16, which 0.19 still reads: plain values are in common.pt.
LAYOUT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, loaded on every access; `meta` has tensors of the same shapes and types on the meta device."""

    def __init__(self, meta: Mapping[str, Tensor], load: Callable[[str], Tensor]) -> None:
        self.meta, self._load = meta, load

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.meta:
            raise KeyError(name)
        return self._load(name)

    def __contains__(self, name: object) -> bool:  # otherwise Mapping would load the tensor
        return name in self.meta

    def __iter__(self) -> Iterator[str]:
        return iter(self.meta)

    def __len__(self) -> int:
        return len(self.meta)


def meta_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the tensors; meta tensors of the same shapes and types in place of lazy ones, which stay unloaded."""
    return tensors.meta if isinstance(tensors, LazyTensors) else tensors


class StoredTensors:
    """Reads single tensors of a checkpoint at the places that its table names."""

    def __init__(self, checkpoint: Path, table: Table) -> None:
        self.described = tensors_of(table)
        """The table's description of each tensor, by name; tensors of the optimizer are included."""
        self._checkpoint = checkpoint
        self._places = {(index.fqn, tuple(index.offset or ())): info for index, info in table.storage_data.items()}

    def meta(self, name: str, number: int | None = None) -> Tensor:
        """Return a tensor on the meta device with the shape and type of the one that `read` returns."""
        stored = self.described[name]
        shape = stored.size if number is None else stored.size[1:]
        return torch.empty(shape, dtype=stored.properties.dtype, device="meta")

    def read(self, name: str, number: int | None = None) -> Tensor:
        """Return a whole tensor, or its entry `number` along the first axis, joined from the ranks' parts."""
        stored = self.described[name]
        shape = self.meta(name, number).shape
        whole = None
        num_read = 0
        for chunk in stored.chunks:
            if number is not None and not 0 <= number - chunk.offsets[0] < chunk.sizes[0]:
                continue  # the entry is not in this part
            part, offsets = self._part(name, stored, chunk), chunk.offsets
            if number is not None:
                part, offsets = part[number - offsets[0]], offsets[1:]
            if part.shape == shape:  # this part has all of it: no copy
                return part
            if whole is None:
                whole = torch.empty(shape, dtype=stored.properties.dtype)
            whole[tuple(slice(at, at + size) for at, size in zip(offsets, part.shape, strict=True))] = part
            num_read += part.numel()
        if whole is None or num_read != whole.numel():
            raise self._missing(name)
        return whole

    def _part(self, name: str, stored: TensorStorageMetadata, chunk: ChunkStorageMetadata) -> Tensor:
        """Read one part of a tensor, and check its shape and type."""
        place = self._places.get((name, tuple(chunk.offsets))) or self._places.get((name, ()))  # (): offset not stored
        if place is None:
            raise self._missing(name)
        part = read_entry(self._checkpoint / place.relative_path, place.offset, place.length)
        if not isinstance(part, Tensor) or part.shape != chunk.sizes or part.dtype != stored.properties.dtype:
            raise CorruptError(
                f"{self._checkpoint / place.relative_path} does not hold {name} as its table says; copy it again"
            )
        return part.detach()

    def _missing(self, name: str) -> CorruptError:
        return CorruptError(f"{self._checkpoint / METADATA} does not hold all of {name}; use another checkpoint")


def open_full_tensors(checkpoint: Path, *, main: bool = False) -> LazyTensors:
    """Return the whole weights of a checkpoint; with `main`, the float32 main weights under the weights' names."""
    stored = StoredTensors(checkpoint, read_checked(checkpoint))
    weights = [name for name in stored.described if not name.startswith(OPTIMIZER_PREFIX)]
    sources = {name: main_weight_name(name, stored.described) if main else name for name in weights}
    meta = {name: stored.meta(source) for name, source in sources.items()}
    return LazyTensors(meta, lambda name: stored.read(sources[name]))


def write_full_tensors(
    run: Path, tensors: Mapping[str, Tensor], config: dict[str, Any], attachments: Mapping[str, bytes]
) -> Path:
    """Publish whole tensors as a run's checkpoint of step 0, which every layout can load.

    Args:
        config: the run's configuration.
        attachments: the content of further small files in the checkpoint, by name.

    Raises:
        FanformerError, KeyboardInterrupt: loading a lazy tensor raised it.
        RuntimeError: the files could not be written.
    """
    checkpoints = run / run_folder.CHECKPOINTS
    folder = run_folder.temporary_folder(checkpoints, 0)
    planned = {name: torch.empty_like(tensor, device="meta") for name, tensor in meta_of(tensors).items()}
    writer = FileSystemWriter(folder, single_file_per_rank=False, sync_files=False)  # publishing flushes the files
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        try:
            save(planned, storage_writer=writer, planner=_OneByOne(tensors), no_dist=True)
        except CheckpointException as error:  # a BaseException, which callers would not catch
            reason, _ = next(iter(error.failures.values()))  # of the only rank
            if isinstance(reason, FanformerError | KeyboardInterrupt):  # reading failed, not writing
                raise reason from None
            raise RuntimeError(f"{folder} was not written ({reason})") from error
    torch.save({}, folder / COMMON)
    (folder / run_folder.MEGATRON_METADATA).write_text(json.dumps(LAYOUT))
    return run_folder.publish_checkpoint(checkpoints, 0, folder, config, attachments)


class _OneByOne(DefaultSavePlanner):
    """A planner for a state dict of meta tensors, which loads a tensor when the writer asks for its data."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._tensors[write_item.index.fqn].detach().contiguous()
