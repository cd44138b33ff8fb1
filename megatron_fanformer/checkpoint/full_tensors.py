"""A checkpoint's weights as whole tensors under their global names, for conversion, one tensor in memory at a time.

The files are those of torch's distributed checkpoints: a table, `.metadata`, and the parts of tensors as torch archives
in `.distcp` files. They are read here by the table itself, and written by torch's own writer; no ranks are needed. What
is written, one file per tensor, loads in both versions of megatron-core.
"""

import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from megatron_fanformer.checkpoint import store
from megatron_fanformer.checkpoint.data_files import read_entry
from megatron_fanformer.checkpoint.plain_values import COMMON, check_plain_values
from megatron_fanformer.checkpoint.stored_files import check_stored
from megatron_fanformer.checkpoint.tensor_table import METADATA, read_table, tensors_of
from megatron_fanformer.errors import CorruptError

OPTIMIZER_PREFIX = "optimizer."
# What megatron-core 0.16 writes, and 0.19 still reads: plain values are in a file of their own.
LAYOUT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each read or made on request, and kept by the caller alone.

    Args:
        meta: each tensor's shape and type, on the meta device.
        load: returns the tensor of a name.
    """

    def __init__(self, meta: Mapping[str, Tensor], load: Callable[[str], Tensor]) -> None:
        self.meta, self._load = meta, load

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.meta:
            raise KeyError(name)
        return self._load(name)

    def __contains__(self, name: object) -> bool:  # Mapping's own would load the tensor
        return name in self.meta

    def __iter__(self) -> Iterator[str]:
        return iter(self.meta)

    def __len__(self) -> int:
        return len(self.meta)


def meta_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors that give shapes and types without loading any."""
    return tensors.meta if isinstance(tensors, LazyTensors) else tensors


def open_full_tensors(checkpoint: Path) -> LazyTensors:
    """The weights of a checkpoint of any layout, whole, read one by one; the optimizer's state is left out.

    Nothing in a checkpoint is executed: its table is read as data alone, its tensors as weights only.

    Raises:
        CorruptError: a file has changed since it was written; the table holds more than a table, or names files
            elsewhere; a tensor that cannot be read raises it later.
    """
    check_stored(checkpoint)
    table = read_table(checkpoint)
    check_plain_values(checkpoint, table)  # whoever loads the checkpoint later reads them, too
    weights = {name: stored for name, stored in tensors_of(table).items() if not name.startswith(OPTIMIZER_PREFIX)}
    meta = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype, device="meta") for name, stored in weights.items()
    }
    places = {(index.fqn, tuple(index.offset or ())): info for index, info in table.storage_data.items()}
    return LazyTensors(meta, lambda name: _read_tensor(checkpoint, weights[name], places, name))


def write_full_tensors(
    run: Path, tensors: Mapping[str, Tensor], config: dict[str, Any], attachments: list[Path]
) -> Path:
    """Publish whole tensors as the checkpoint of step 0 of a run's folder, for any layout to load.

    Lazy tensors are requested one at a time.
    """
    checkpoints = run / store.CHECKPOINTS
    folder = store.temporary_folder(checkpoints, 0)
    meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in meta_of(tensors).items()}
    writer = FileSystemWriter(folder, single_file_per_rank=False, sync_files=False)  # publishing flushes the files
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        save(meta, storage_writer=writer, planner=_OneByOne(tensors), no_dist=True)
    torch.save({}, folder / COMMON)
    (folder / store.MEGATRON_METADATA).write_text(json.dumps(LAYOUT))
    return store.publish_checkpoint(folder, checkpoints, 0, config, attachments=attachments)


class _OneByOne(DefaultSavePlanner):
    """Plans by shapes and types alone, and gives the writer each tensor when it is due."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._tensors[write_item.index.fqn].detach().contiguous()


def _read_tensor(checkpoint: Path, stored: TensorStorageMetadata, places: Mapping[Any, Any], name: str) -> Tensor:
    whole = None
    covered = 0
    for chunk in stored.chunks:
        place = places.get((name, tuple(chunk.offsets))) or places.get((name, ()))
        if place is None:
            raise CorruptError(f"{checkpoint / METADATA} does not hold all of {name}; use another checkpoint")
        part = read_entry(checkpoint / place.relative_path, place.offset, place.length)
        if not isinstance(part, Tensor) or part.shape != chunk.sizes or part.dtype != stored.properties.dtype:
            raise CorruptError(
                f"{checkpoint / place.relative_path} does not hold {name} as its table says; copy it again"
            )
        part = part.detach()
        covered += part.numel()
        if part.shape == stored.size:
            return part
        if whole is None:
            whole = torch.empty(stored.size, dtype=stored.properties.dtype)
        whole[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))] = part
    if whole is None or covered != whole.numel():
        raise CorruptError(f"{checkpoint / METADATA} does not hold all of {name}; use another checkpoint")
    return whole
