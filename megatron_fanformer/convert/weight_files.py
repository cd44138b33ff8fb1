"""Weight files on disk, read and written one tensor at a time.

Nothing that is read is executed, and nothing written in a file can have a file outside the folder opened. (Links in the
folder are followed: the Hugging Face cache consists of links.)
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
PICKLED_NAME = "gA"  # a pickle's first bytes in base 64, in which the authors' code writes nested names
HEADER_MULTIPLE = 8
LARGEST_INDEX_BYTES = 1 << 26  # of the list of shards: a million tensors


# -- reading


def open_weights(folder: Path) -> LazyTensors:
    """Return the tensors of a folder: `model.safetensors`, whole or in shards, `model.pt` or `pytorch_model.bin`.

    Pickled files are mapped into memory, and loaded as weights only.

    Raises:
        InputError: the folder has none of them.
        CorruptError: a file cannot be read, holds more than tensors, or is named by a path; damage in a tensor's own
            bytes, which safetensors cannot detect, goes unnoticed.
    """
    with _reporting_damage(folder):
        files = weight_files(folder)
        if files[0].suffix != ".safetensors":
            is_mapped = zipfile.is_zipfile(files[0])  # older pickles are not archives, and cannot be mapped
            tensors = _load_pickled(files[0], is_mapped)
            meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
            # Mapped anew each time: a map keeps the pages that were read in memory.
            return LazyTensors(meta, lambda name: (_load_pickled(files[0], True) if is_mapped else tensors)[name])
        return _in_safetensors(folder, files)


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a folder's weights; those that the index of shards names need not exist.

    Raises:
        InputError: the folder has none.
        CorruptError: the index names something other than files of the folder.
    """
    if (folder / SAFETENSORS).is_file():
        return [folder / SAFETENSORS]
    if (folder / SAFETENSORS_INDEX).is_file():
        return [folder / shard for shard in _shards_named(folder / SAFETENSORS_INDEX)]
    for name in PICKLED:
        if (folder / name).is_file():
            return [folder / name]
    names = ", ".join((SAFETENSORS, SAFETENSORS_INDEX, *PICKLED))
    raise InputError(f"{folder} holds no weights; it must hold one of {names}")


def _shards_named(index: Path) -> list[str]:
    content = json.loads(regular_file(index, most_bytes=LARGEST_INDEX_BYTES).read_text(encoding="utf-8"))
    shards = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise CorruptError(f"{index} names no shards; copy it again")
    for shard in shards.values():
        plain = isinstance(shard, str) and Path(shard).name == shard and "\\" not in shard
        if not plain or not shard.endswith(".safetensors"):
            raise CorruptError(
                f"{index} names {shard!r}, which is not a safetensors file in its folder; put the shards next to "
                "the index, and list them by file name"
            )
    return sorted(set(shards.values()))


def _in_safetensors(folder: Path, files: list[Path]) -> LazyTensors:
    meta: dict[str, Tensor] = {}
    places: dict[str, Path] = {}
    for file in files:
        for name, shape in _shapes_in(file):
            if name in meta:
                raise CorruptError(f"{file} holds {name}, which another shard holds too; copy the folder again")
            meta[name], places[name] = shape, file

    def load(name: str) -> Tensor:
        # Reopened each time: an open file keeps the pages that were read in memory.
        with _reporting_damage(folder), safetensors.safe_open(places[name], framework="pt") as stream:
            return stream.get_tensor(name)

    return LazyTensors(meta, load)


def _shapes_in(file: Path) -> Iterator[tuple[str, Tensor]]:
    with safetensors.safe_open(regular_file(file), framework="pt") as stream:
        for name in stream.keys():  # noqa: SIM118 (it is not a mapping)
            if name.startswith(PICKLED_NAME):
                raise CorruptError(
                    f"{file} has pickles as tensor names, which loading would execute; "
                    "use model.pt instead, or save it again with safetensors.torch.save_file under plain names"
                )
            part = stream.get_slice(name)
            dtype = SAFETENSORS_TYPES.get(kind := part.get_dtype())
            if dtype is None:
                raise CorruptError(
                    f"{file} holds {name} as {kind}, in no number format of weights "
                    f"({', '.join(SAFETENSORS_TYPES)}); save the model in one of these, unquantized"
                )
            yield name, torch.empty(part.get_shape(), dtype=dtype, device="meta")


def _load_pickled(file: Path, is_mapped: bool) -> dict[str, Tensor]:
    with reporting_damage(file, trusted=f"save only the tensors, as {SAFETENSORS}", whole="copy it again"):
        loaded = load_data(file, mapped=is_mapped)
    if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise CorruptError(f"{file} holds something other than tensors by name; save only the model's state dict")
    return loaded


def _reporting_damage(folder: Path) -> AbstractContextManager[None]:
    return reporting_damage(f"the weights in {folder}", whole="copy them again", also=(safetensors.SafetensorError,))


# -- writing


def write_shards(folder: Path, tensors: Mapping[str, Tensor], *, max_shard_size: str) -> None:
    """Write safetensors as transformers reads them: one file, or shards of `max_shard_size` and an index.

    Lazy tensors are requested in order, one at a time.

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
    """Write the named tensors into one file, each as it comes: safetensors' own writer needs all of them at once."""
    meta = meta_of(tensors)
    # Wide types first, so that each tensor is aligned to its type.
    order = sorted(names, key=lambda name: -meta[name].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + meta[name].nbytes
        kind = _TYPE_NAMES[meta[name].dtype]
        header[name] = {"dtype": kind, "shape": list(meta[name].shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_MULTIPLE)
    with path.open("wb") as stream:  # buffered: it goes on where a call writes a part, and copies no large tensor
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            tensor = tensors[name].detach()
            assert tensor.shape == meta[name].shape and tensor.dtype == meta[name].dtype, name
            stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
