"""A checkpoint's table of tensors, also one that says what is not so, and the parts of tensors that it names."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fanformer.checkpoint.full_tensors import StoredTensors, write_full_tensors
from megatron_fanformer.checkpoint.tensor_table import METADATA, read_table
from megatron_fanformer.errors import CorruptError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_full_tensors(tmp_path, {"w": torch.arange(6.0).view(3, 2)}, {}, {})


def test_a_tensor_of_which_a_part_is_missing_is_not_read(checkpoint: Path) -> None:
    table = read_table(checkpoint)
    assert torch.equal(StoredTensors(checkpoint, table).read("w"), torch.arange(6.0).view(3, 2))
    table.state_dict_metadata["w"].size = torch.Size([4, 2])
    with pytest.raises(CorruptError, match="does not hold all of w"):
        StoredTensors(checkpoint, table).read("w")


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "inner/a.distcp", "..", ".", 7])
def test_a_table_names_files_of_its_folder_alone(checkpoint: Path, name: Any) -> None:
    table = read_table(checkpoint)
    for place in table.storage_data.values():
        place.relative_path = name
    (checkpoint / METADATA).write_bytes(pickle.dumps(table))
    with pytest.raises(CorruptError, match="which is not a file in its folder"):
        read_table(checkpoint)


def test_a_path_is_read_as_every_python_writes_it(checkpoint: Path) -> None:
    """Python 3.13 names another module than those before and after it."""
    table = read_table(checkpoint)
    assert isinstance(table.storage_meta.checkpoint_id, Path)
    plain, moved = b"cpathlib\nPosixPath\n", b"cpathlib._local\nPosixPath\n"
    content = pickle.dumps(table, protocol=2).replace(moved, plain)
    assert content.count(plain) == 1
    for written in (content, content.replace(plain, moved)):
        (checkpoint / METADATA).write_bytes(written)
        assert read_table(checkpoint) == table
