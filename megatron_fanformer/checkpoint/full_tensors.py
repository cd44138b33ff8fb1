"""A checkpoint's weights as whole tensors under their global names, for conversion, one tensor in memory at a time.

The files are those of torch's distributed checkpoints: a table, `.metadata`, and the parts of tensors as torch archives
in `.distcp` files. They are read here by the table itself, and written by torch's own writer; no ranks are needed. What
is written, a file a tensor, loads in both versions of megatron-core.
"""

import io
import json
import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

from megatron_fanformer.checkpoint import store
from megatron_fanformer.checkpoint.tensor_table import read_table, tensors_of
from megatron_fanformer.errors import CorruptError

OPTIMIZER_PREFIX = "optimizer."
COMMON = "common.pt"
# What megatron-core 0.16 writes, and 0.19 still reads: plain values are in a file of their own.
LAYOUT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each read or made when it is asked for, and kept by the caller alone.

    Args:
        meta: each tensor's shape and type, on the meta device.
        load: gives the tensor of a name.
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
    """Tensors to ask for shapes and types, without loading any."""
    return tensors.meta if isinstance(tensors, LazyTensors) else tensors


def open_full_tensors(checkpoint: Path) -> LazyTensors:
    """The weights of a checkpoint of any layout, whole, read one by one; the optimizer's state is left out.

    Nothing of a checkpoint is executed: its table is read as data alone, its tensors as weights only.

    Raises:
        CorruptError: the table cannot be read, holds more than a table, or names files elsewhere; a tensor that cannot
            be read raises it later.
    """
    table = read_table(checkpoint)
    _check_plain_values(checkpoint)
    weights = {name: stored for name, stored in tensors_of(table).items() if not name.startswith(OPTIMIZER_PREFIX)}
    meta = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype, device="meta") for name, stored in weights.items()
    }
    places = {(index.fqn, tuple(index.offset or ())): info for index, info in table.storage_data.items()}
    return LazyTensors(meta, lambda name: _read_tensor(checkpoint, weights[name], places, name))


def plain_values(checkpoint: Path) -> dict[str, Any]:
    """What megatron-core 0.16 keeps beside the tensors; empty where there is no such file.

    Raises:
        CorruptError: it cannot be read as data alone.
    """
    path = checkpoint / COMMON
    if not path.is_file():
        return {}
    with damage_told(path):
        return dict(load_data(path))


def write_full_tensors(
    run: Path, tensors: Mapping[str, Tensor], config: dict[str, Any], attachments: list[Path]
) -> Path:
    """Publish whole tensors as the checkpoint of step 0 of a run's folder, for any layout to load.

    Lazy tensors are asked for one at a time.
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
    """Plans by shapes and types alone, and gives the writer each tensor when it comes to it."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False)
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        return self._tensors[write_item.index.fqn].detach().contiguous()


def _check_plain_values(checkpoint: Path) -> None:
    plain_values(checkpoint)  # whoever loads the checkpoint after us reads them, too


def load_data(file: Any, device: str = "cpu", *, mapped: bool = False) -> Any:
    """What a torch file holds, as tensors and plain values: anything else is refused.

    Raises:
        pickle.UnpicklingError: it holds something else.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected pickle protocol")  # of a file that is refused, or is not
        return torch.load(file, map_location=device, weights_only=True, mmap=mapped)


def _read_tensor(checkpoint: Path, stored: TensorStorageMetadata, places: Mapping[Any, Any], name: str) -> Tensor:
    whole = None
    covered = 0
    for chunk in stored.chunks:
        place = places.get((name, tuple(chunk.offsets))) or places.get((name, ()))
        if place is None:
            raise CorruptError(f"{checkpoint / '.metadata'} has not all of {name}; take another checkpoint")
        part = _read_part(checkpoint / place.relative_path, place.offset, place.length)
        if part.shape != chunk.sizes or part.dtype != stored.properties.dtype:
            raise CorruptError(f"{checkpoint / place.relative_path} holds no {name} as its table says; copy it anew")
        covered += part.numel()
        if part.shape == stored.size:
            return part
        if whole is None:
            whole = torch.empty(stored.size, dtype=stored.properties.dtype)
        whole[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))] = part
    if whole is None or covered != whole.numel():
        raise CorruptError(f"{checkpoint / '.metadata'} has not all of {name}; take another checkpoint")
    return whole


def _read_part(path: Path, offset: int, length: int) -> Tensor:
    with damage_told(path), path.open("rb") as stream:
        size = path.stat().st_size
        if offset + length > size:
            raise CorruptError(f"{path} ends too early; take another checkpoint")
        # A file of one part, as `write_full_tensors` makes them, is mapped: a copy takes longer than most that is done
        # with it.
        part = load_data(path, mapped=True) if length == size else load_data(Section(stream, offset, length))
        if not isinstance(part, Tensor):
            raise CorruptError(f"{path} holds something else than a tensor; take another checkpoint")
        return part.detach()


@contextmanager
def damage_told(path: Path) -> Iterator[None]:
    """Around reading a file of a checkpoint: what damage, or more than data in it, leads to becomes a CorruptError."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise CorruptError(
            f"{path} holds more than data, which loading might execute: it is refused ({what_was_refused(error)}); "
            "take a checkpoint from somebody whom you trust"
        ) from error
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, AttributeError, TypeError) as error:
        if isinstance(error, torch.OutOfMemoryError):  # not the checkpoint's fault
            raise
        raise CorruptError(f"{path} cannot be read ({_first_line(error)}); take an earlier checkpoint") from error


def what_was_refused(error: pickle.UnpicklingError) -> str:
    """What a pickle has that torch's loading of weights does not know; its message is a page long."""
    found = re.search(r"GLOBAL ([\w.]+)|(Unsupported [\w ]+)", str(error))
    return next(part for part in found.groups() if part) if found else _first_line(error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class Section(io.RawIOBase):
    """A range of a file as a file of its own, read without a copy."""

    def __init__(self, stream: BinaryIO, offset: int, length: int) -> None:
        self._stream, self._offset, self._length, self._position = stream, offset, length, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next byte comes from."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place in the range; returns it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as the range goes."""
        wanted = max(0, min(len(buffer), self._length - self._position))
        read = os.preadv(self._stream.fileno(), [memoryview(buffer)[:wanted]], self._offset + self._position)
        self._position += read
        return read
