"""Folders made by somebody who wishes harm: refused with exit code 3, and nothing of them is executed."""

import base64
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from megatron_fanformer.checkpoint.manifest import write_manifest
from megatron_fanformer.cli import main
from megatron_fanformer.convert.convert import convert_checkpoint
from megatron_fanformer.convert.recognition import find_checkpoint
from megatron_fanformer.errors import CorruptError, InputError
from tests.convert.plain_fanformer import VARIANTS, write

BASE = VARIANTS["fanformer"]


class Bomb:
    """Makes the marker when it is loaded as a pickle."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return write(tmp_path / "reference", BASE)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint of ours."""
    folder = tmp_path_factory.mktemp("published")
    convert_checkpoint(write(folder / "reference", BASE), folder / "run", to="megatron", verified=False)
    return find_checkpoint(folder / "run")


@pytest.fixture
def megatron(published: Path, tmp_path: Path) -> Path:
    """A copy of it to be changed."""
    return Path(shutil.copytree(published, tmp_path / "megatron"))


@pytest.fixture
def huggingface(reference: Path, tmp_path: Path) -> Path:
    convert_checkpoint(reference, tmp_path / "hf", to="hf", max_shard_size="20KB", verified=False)
    return tmp_path / "hf"


@pytest.fixture
def refused(tmp_path: Path, marker: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[Path], str]:
    """What is said when a folder is refused; it must be exit code 3, and leave neither marker nor destination."""

    def convert(folder: Path) -> str:
        to = "megatron"
        if (folder / "metadata.json").exists():
            to = "hf"
            write_manifest(folder, 0)  # as whoever changes a file on purpose would
        assert main(["convert", str(folder), str(tmp_path / "out"), "--to", to]) == 3
        assert not marker.exists() and not (tmp_path / "out").exists()
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return convert


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin"])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_as_weights(name: str, legacy: bool, reference: Path, marker: Path, refused: Any) -> None:
    (reference / "model.safetensors").unlink()
    torch.save({"a": Bomb(marker)}, reference / name, _use_new_zipfile_serialization=not legacy)
    assert "which loading might execute; save only the tensors" in refused(reference)


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_a_pickle_as_a_safetensors_key(encode: Any, reference: Path, marker: Path, refused: Any) -> None:
    key = encode(pickle.dumps(Bomb(marker))).decode()
    save_file({key: torch.ones(2)}, reference / "model.safetensors")
    assert "has pickles as tensor names" in refused(reference)


@pytest.mark.parametrize(
    "shard", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 7, None, "x.bin"]
)
def test_a_shard_outside_the_folder(shard: Any, huggingface: Path, refused: Any) -> None:
    file = huggingface / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    name = next(iter(index["weight_map"]))
    if shard == "../outside.safetensors":  # it would serve
        shutil.copyfile(huggingface / index["weight_map"][name], huggingface.parent / "outside.safetensors")
    index["weight_map"][name] = shard
    file.write_text(json.dumps(index))
    assert "which is not a safetensors file in its folder; " in refused(huggingface)


@pytest.mark.parametrize("form", ["reference", "megatron"])
def test_yaml_with_an_object(form: str, request: pytest.FixtureRequest, marker: Path, refused: Any) -> None:
    file = request.getfixturevalue(form) / "config.yaml"
    file.write_text(file.read_text() + f"x: !!python/object/apply:os.mkdir ['{marker}']\n")
    assert "config.yaml cannot be read: could not determine a constructor" in refused(file.parent)


@pytest.mark.parametrize(
    "code",
    [
        b'cbuiltins\neval\n(S\'__import__("os").mkdir("{marker}")\'\ntR.',
        b"ctorch.serialization\nos.mkdir\n(S'{marker}'\ntR.",
        b"\x80\x04\x8c\x13torch.serialization\x8c\x08os.mkdir\x93\x8c{length}{marker}\x85R.",
        b"cmegatron.core.dist_checkpointing.strategies.torch\nPath\n(S'{marker}'\ntR.",
        b"ctorch\nload\n(S'{marker}'\ntR.",
        b"garbage",
        b"",
    ],
)
def test_other_pickles_as_a_checkpoints_table(code: bytes, megatron: Path, marker: Path, refused: Any) -> None:
    name = str(marker).encode()
    (megatron / ".metadata").write_bytes(code.replace(b"{marker}", name).replace(b"{length}", bytes([len(name)])))
    assert ".metadata" in refused(megatron)


@pytest.mark.parametrize(
    ("record", "field", "value"),
    [
        ("place", "offset", -1),
        ("place", "offset", "0"),
        ("place", "length", None),
        ("tensor", "size", [1 << 40]),
        ("tensor", "chunks", "chunks"),
        ("tensor", "properties", None),
        ("chunk", "offsets", torch.Size([0, 0, 0])),
        ("chunk", "sizes", (1, 2)),
        ("table", "storage_data", []),
        ("table", "storage_data", {"a": "b"}),
        ("table", "state_dict_metadata", None),
        ("table", "state_dict_metadata", {7: None}),
    ],
)
def test_a_table_whose_fields_are_something_else(
    record: str, field: str, value: Any, megatron: Path, refused: Any
) -> None:
    table = pickle.loads((megatron / ".metadata").read_bytes())
    tensor = table.state_dict_metadata["embedding.word_embeddings.weight"]
    place = next(iter(table.storage_data.values()))
    changed = {"table": table, "tensor": tensor, "chunk": tensor.chunks[0], "place": place}[record]
    object.__setattr__(changed, field, value)
    (megatron / ".metadata").write_bytes(pickle.dumps(table))
    assert ".metadata cannot be read" in refused(megatron)


def test_code_in_a_hugging_face_folder_is_not_run(huggingface: Path, marker: Path, tmp_path: Path) -> None:
    """It is opened by our own classes; the folder's may say what they like."""
    for name in ("modeling_fanformer.py", "configuration_fanformer.py"):
        (huggingface / name).write_text(f"import os; os.mkdir({str(marker)!r})")
    convert_checkpoint(huggingface, tmp_path / "out", to="megatron")
    assert not marker.exists()


NO_SIZES = ("abc", [], -1, 0, 0.5, float("nan"), 1 << 70)


def state_model(folder: Path, field: str, value: Any) -> None:
    """State another value of a model's field in the configuration of a folder."""
    file = folder / "config.yaml"
    saved = yaml.safe_load(file.read_text())
    saved["model"][field] = value
    file.write_text(yaml.safe_dump(saved))


@pytest.mark.parametrize("value", NO_SIZES)
@pytest.mark.parametrize("field", ["num_layers", "hidden_size", "num_attention_heads", "vocab_size"])
def test_a_model_that_is_none_in_a_checkpoint_of_ours(field: str, value: Any, megatron: Path, refused: Any) -> None:
    """Refused before sizes are computed or layers are counted."""
    state_model(megatron, field, value)
    assert "config.yaml states no model" in refused(megatron)


@pytest.mark.parametrize("value", NO_SIZES)
@pytest.mark.parametrize("field", ["n_layers", "d_model", "n_heads", "vocab_size", "mlp_hidden_size"])
def test_a_model_that_is_none_in_the_authors_format(field: str, value: Any, reference: Path, tmp_path: Path) -> None:
    state_model(reference, field, value)
    with pytest.raises((InputError, CorruptError)):
        convert_checkpoint(reference, tmp_path / "out", to="hf")


def test_a_p_ratio_that_the_weights_contradict(reference: Path, megatron: Path, refused: Any) -> None:
    """Of a checkpoint's own: corrupt, not wrong input; no option of the command states one."""
    file = reference / "config.yaml"
    file.write_text(file.read_text() + "  p_ratio: 0.125\n")
    assert "p_ratio is stated as 0.125" in refused(reference)
    file = megatron / "config.yaml"
    file.write_text(file.read_text().replace("p_ratio: 0.25", "p_ratio: 0.125"))
    assert "weights do not match their configuration" in refused(megatron)
