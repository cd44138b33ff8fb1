"""Weight files as they are written, sizes and alignment, and as others write them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_fanformer.convert.weight_files import open_weights, write_safetensors, write_shards
from megatron_fanformer.errors import CorruptError, InputError


@pytest.mark.parametrize("size", ["", "GB", "5PB"])
def test_what_is_no_size_is_refused(size: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="write one such as 5GB or 500MB"):
        write_shards(tmp_path, {"w": torch.ones(2)}, max_shard_size=size)


@pytest.mark.parametrize("name", ["a", "ab", "abc", "abcdefghijk"])
def test_tensors_are_aligned_to_their_types(name: str, tmp_path: Path) -> None:
    tensors = {name: torch.arange(3, dtype=torch.bfloat16), "double": torch.arange(5, dtype=torch.float64)}
    write_safetensors(tmp_path / "model.safetensors", tensors, list(tensors))
    content = (tmp_path / "model.safetensors").read_bytes()
    header = int.from_bytes(content[:8], "little")
    assert (8 + header) % 8 == 0
    assert content[8 + header :] == b"".join(tensors[n].view(torch.uint8).numpy().tobytes() for n in ("double", name))
    read = load_file(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys() and all(torch.equal(read[n], tensors[n]) for n in tensors)


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.int8, "I8"), (torch.int64, "I64"), (torch.float8_e4m3fn, "F8_E4M3")], ids=str
)
def test_quantized_weights_are_not_taken_for_damage(dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, 2).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(CorruptError, match=f"model.safetensors holds w as {kind}, in no number format .*unquantized$"):
        open_weights(tmp_path)
