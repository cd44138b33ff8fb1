"""Weight files on disk, and folders that appear whole or not at all."""

import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from megatron_fanformer.errors import CorruptError, InputError

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("model.pt", "pytorch_model.bin")
SAFETENSORS_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_UNREADABLE = (safetensors.SafetensorError, pickle.UnpicklingError)


@contextmanager
def new_folder(destination: Path) -> Iterator[Path]:
    """A folder to fill, which takes the name `destination` when the block ends, and is removed if it fails.

    Raises:
        InputError: `destination` exists already.
    """
    if destination.exists():
        raise InputError(f"{destination} exists already; name another destination, or remove it")
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.with_name(f".{destination.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        partial.rename(destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: `model.safetensors`, whole or in shards, `model.pt` or `pytorch_model.bin`.

    Raises:
        InputError: the folder has none of them.
        CorruptError: a file cannot be read.
    """
    with _damage_told(folder):
        return _read_weights(folder)


@contextmanager
def _damage_told(folder: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, EOFError, *_UNREADABLE) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CorruptError(f"the weights in {folder} cannot be read: {reason}; copy them anew") from error


def _read_weights(folder: Path) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = {}
    for file in weight_files(folder):
        if file.suffix == ".safetensors":
            loaded.update(safetensors.torch.load_file(file))
        else:
            loaded.update(torch.load(file, map_location="cpu", weights_only=True))
    return loaded


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights; those that the index of shards names need not be there.

    Raises:
        InputError: the folder has none.
    """
    if (folder / SAFETENSORS).is_file():
        return [folder / SAFETENSORS]
    if (folder / SAFETENSORS_INDEX).is_file():
        shards = json.loads((folder / SAFETENSORS_INDEX).read_text())["weight_map"].values()
        return [folder / shard for shard in sorted(set(shards))]
    for name in PICKLED:
        if (folder / name).is_file():
            return [folder / name]
    names = ", ".join((SAFETENSORS, SAFETENSORS_INDEX, *PICKLED))
    raise InputError(f"{folder} holds no weights; it must hold one of {names}")


def read_shapes(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder as `read_weights` returns them, but on the meta device: no weights are read.

    Raises:
        InputError, CorruptError: as `read_weights`; so for a safetensors file that is longer or shorter than it says.
    """
    with _damage_told(folder):
        shapes: dict[str, Tensor] = {}
        for file in weight_files(folder):
            if file.suffix == ".safetensors":
                shapes.update(_shapes_in(file))
            else:
                # Older pickles are no archives, and cannot be mapped.
                is_archive = zipfile.is_zipfile(file)
                shapes.update(torch.load(file, map_location="meta", weights_only=True, mmap=is_archive))
        return shapes


def _shapes_in(file: Path) -> Iterator[tuple[str, Tensor]]:
    with safetensors.safe_open(file, framework="pt") as stream:
        for name in stream.keys():  # noqa: SIM118 (it is no mapping)
            part = stream.get_slice(name)
            dtype = SAFETENSORS_TYPES[part.get_dtype()]
            yield name, torch.empty(part.get_shape(), dtype=dtype, device="meta")


def write_shards(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: torch.dtype,
    max_shard_size: str,
) -> None:
    """Write safetensors as transformers reads them: one file, or shards of `max_shard_size` and an index.

    `tensors` come in the order of `shapes` and are cast to `dtype`; copies of one shard are held at a time.
    """
    layout = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()}
    plan = split_torch_state_dict_into_shards(layout, max_shard_size=max_shard_size)
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        shard[name] = tensor.detach().to(device="cpu", dtype=dtype).contiguous()
        file = plan.tensor_to_filename[name]
        if len(shard) == len(plan.filename_to_tensors[file]):
            safetensors.torch.save_file(shard, folder / file, metadata={"format": "pt"})
            shard = {}
    assert not shard, "the tensors did not come in the order of the shapes"
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2) + "\n")
