"""Reads and writes files of weights, one tensor at a time.

Nothing in a file is executed, and no name in a file makes another folder's file be opened. (Links in the folder are
followed: the Hugging Face cache consists of links.)
"""

import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import safetensors
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from megatron_fanformer.checkpoint.data_files import load_data, reporting_damage
from megatron_fanformer.checkpoint.full_tensors import LazyTensors, meta_of
from megatron_fanformer.durable_files import regular_file
from megatron_fanformer.errors import CorruptError, InputError

SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
MODEL_PT = "model.pt"
PICKLED = (MODEL_PT, "pytorch_model.bin")
SAFETENSORS_TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TYPE_NAMES = {dtype: name for name, dtype in SAFETENSORS_TYPES.items()}
PICKLED_NAME = "gA"  # a pickle's first bytes in base 64: the authors' code writes nested names as such pickles
HEADER_MULTIPLE = 8  # bytes: safetensors pads its header, so that the tensors behind it are aligned
LARGEST_INDEX_BYTES = 1 << 26  # enough for the names and shards of a million tensors


# -- reading


def open_weights(folder: Path) -> LazyTensors:
    """Return the tensors of a folder: `model.safetensors`, whole or in shards, `model.pt` or `pytorch_model.bin`.

    Pickled files are mapped into memory, and loaded as weights only.

    Raises:
        InputError: the folder has none of these files.
        CorruptError: a file cannot be read or holds more than tensors, or the index names a file of another folder.
            Damage in a tensor's bytes goes unnoticed in safetensors, which have no checksum.
    """
    with _reporting_damage(folder):
        files = weight_files(folder)
        if files[0].suffix != ".safetensors":
            is_mapped = zipfile.is_zipfile(files[0])  # older pickles are not archives, and cannot be mapped
            tensors = _load_pickled(files[0], is_mapped)
            meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
            # Mapped anew for every tensor: a map keeps the pages that were read in memory.
            return LazyTensors(meta, lambda name: (_load_pickled(files[0], True) if is_mapped else tensors)[name])
        return _open_safetensors(folder, files)


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a folder's weights; the shards that an index names need not exist.

    Raises:
        InputError: the folder has no such file.
        CorruptError: the index names anything but safetensors files in the folder.
    """
    if (folder / SAFETENSORS).is_file():
        return [folder / SAFETENSORS]
    if (folder / SAFETENSORS_INDEX).is_file():
        return [folder / shard for shard in _read_shard_names(folder / SAFETENSORS_INDEX)]
    for name in PICKLED:
        if (folder / name).is_file():
            return [folder / name]
    names = ", ".join((SAFETENSORS, SAFETENSORS_INDEX, *PICKLED))
    raise InputError(f"{folder} holds no weights; it must hold one of {names}")


def _read_shard_names(index: Path) -> list[str]:
    """Return the names of the shards in an index; raise CorruptError if one is not a safetensors file beside it."""
    content = json.loads(regular_file(index, most_bytes=LARGEST_INDEX_BYTES).read_text(encoding="utf-8"))
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise CorruptError(f"{index} names no shards; copy it again")
    for shard in shards.values():
        is_file_name = isinstance(shard, str) and Path(shard).name == shard and "\\" not in shard
        if not is_file_name or not shard.endswith(".safetensors"):
            raise CorruptError(
                f"{index} names {shard!r}, which is not a safetensors file in its folder; put the shards next to "
                "the index, and list them by file name"
            )
    return sorted(set(shards.values()))


def _open_safetensors(folder: Path, files: list[Path]) -> LazyTensors:
    meta: dict[str, Tensor] = {}
    file_by_name: dict[str, Path] = {}
    for file in files:
        for name, meta_tensor in _read_meta(file):
            if name in meta:
                raise CorruptError(f"{file} holds {name}, which another shard holds too; copy the folder again")
            meta[name] = meta_tensor
            file_by_name[name] = file

    def load(name: str) -> Tensor:
        # Reopened for every tensor: an open file keeps the pages that were read in memory.
        with _reporting_damage(folder), safetensors.safe_open(file_by_name[name], framework="pt") as stream:
            return stream.get_tensor(name)

    return LazyTensors(meta, load)


def _read_meta(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of every tensor in a safetensors file, with a tensor of its shape and type on the meta device."""
    with safetensors.safe_open(regular_file(file), framework="pt") as stream:
        for name in stream.keys():  # noqa: SIM118 (it is not a mapping)
            if name.startswith(PICKLED_NAME):
                raise CorruptError(
                    f"{file} has pickles as tensor names, which loading would execute; "
                    "use model.pt instead, or save it again with safetensors.torch.save_file under plain names"
                )
            part = stream.get_slice(name)
            type_name = part.get_dtype()
            if type_name not in SAFETENSORS_TYPES:
                raise CorruptError(
                    f"{file} holds {name} as {type_name}, in no number format of weights "
                    f"({', '.join(SAFETENSORS_TYPES)}); save the model in one of these, unquantized"
                )
            yield name, torch.empty(part.get_shape(), dtype=SAFETENSORS_TYPES[type_name], device="meta")


def _load_pickled(file: Path, is_mapped: bool) -> dict[str, Tensor]:
    """Return the tensors by name in a pickled file, without executing code; raise CorruptError if it holds more."""
    with reporting_damage(file, trusted=f"save only the tensors, as {SAFETENSORS}", whole="copy it again"):
        loaded = load_data(file, mapped=is_mapped)
    if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise CorruptError(f"{file} holds something other than tensors by name; save only the model's state dict")
    return loaded


def _reporting_damage(folder: Path) -> AbstractContextManager[None]:
    return reporting_damage(f"the weights in {folder}", whole="copy them again", also=(safetensors.SafetensorError,))


# -- writing


def write_shards(folder: Path, tensors: Mapping[str, Tensor], *, max_shard_size: str) -> None:
    """Write safetensors as transformers reads them: one file, or shards of at most `max_shard_size` and an index.

    Lazy tensors are requested one at a time.

    Raises:
        InputError: `max_shard_size` is not a size.
    """
    try:
        plan = split_torch_state_dict_into_shards(dict(meta_of(tensors)), max_shard_size=max_shard_size)
    except ValueError as error:
        raise InputError(f"--max-shard-size {max_shard_size}: {error}; write one such as 5GB or 500MB") from None
    for file, names in plan.filename_to_tensors.items():
        write_safetensors(folder / file, tensors, names)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / SAFETENSORS_INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], names: list[str]) -> None:
    """Write the named tensors into one file, requesting one at a time: safetensors' own writer needs all in memory."""
    meta = meta_of(tensors)
    # Wide types come first, so that every tensor is aligned to its type.
    order = sorted(names, key=lambda name: -meta[name].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + meta[name].nbytes
        type_name = _TYPE_NAMES[meta[name].dtype]
        header[name] = {"dtype": type_name, "shape": list(meta[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_MULTIPLE)
    with path.open("wb") as stream:  # buffered, which completes writes that are cut short, and copies no large tensor
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            tensor = tensors[name].detach()
            assert tensor.shape == meta[name].shape and tensor.dtype == meta[name].dtype, name
            stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
