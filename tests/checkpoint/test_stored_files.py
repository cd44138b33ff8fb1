"""Checkpoints made by somebody who wishes harm: every reader refuses them, and executes nothing of them."""

import copy
import enum
import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)

from megatron_fanformer.checkpoint import stored_files
from megatron_fanformer.checkpoint.data_files import load_data
from megatron_fanformer.checkpoint.full_tensors import StoredTensors, write_full_tensors
from megatron_fanformer.checkpoint.manifest import write_manifest
from megatron_fanformer.checkpoint.run_folder import MEGATRON_METADATA
from megatron_fanformer.checkpoint.stored_files import COMMON, COMMON_STATE, METADATA, check_format, read_table
from megatron_fanformer.cli import main
from megatron_fanformer.convert.recognition import find_checkpoint
from megatron_fanformer.errors import CorruptError
from tests.convert.test_hostile import Bomb
from tests.generate.making import write_tokenizer
from tests.small_runs import VOCAB_SIZE, small_run, write_config, write_tokens
from tests.train.test_trainer import train

WEIGHT = "decoder.final_layernorm.weight"
RunOnRanks = Callable[..., list[Any]]
Values = dict[str, Any]


@pytest.fixture(scope="module")
def trained(run_on_ranks: RunOnRanks, tmp_path_factory: pytest.TempPathFactory) -> Values:
    """A run of two steps, with a checkpoint after the first and the second."""
    folder = tmp_path_factory.mktemp("trained")
    values = small_run(
        write_tokens(folder / "tokens"),
        folder / "run",
        data={"tokenizer": str(write_tokenizer(folder, VOCAB_SIZE))},
        schedule={"lr_warmup_iters": 1},
        training={"train_iters": 2},
        recovery={"use_earlier_checkpoint": False},
    )
    run_on_ranks(1, train, values)
    return values


@pytest.fixture
def run(trained: Values, tmp_path: Path) -> Values:
    """A copy to be changed, that has a step more to take."""
    shutil.copytree(trained["training"]["run_dir"], tmp_path / "run")
    return {**trained, "training": {**trained["training"], "run_dir": str(tmp_path / "run"), "train_iters": 3}}


@pytest.fixture
def checkpoint(run: Values) -> Path:
    return find_checkpoint(run["training"]["run_dir"])


class _ByName(pickle.Pickler):
    """Pickles the members of enumerations as Python 3.11.2 does."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_enumerations_are_read_as_every_python_writes_them(checkpoint: Path) -> None:
    table = read_table(checkpoint)
    stream = io.BytesIO()
    _ByName(stream).dump(table)
    assert b"getattr" in stream.getvalue()
    (checkpoint / METADATA).write_bytes(stream.getvalue())
    assert read_table(checkpoint) == table


class _Attribute:
    """What `getattr` makes of an owner and a name, when it is unpickled."""

    def __init__(self, owner: Any, name: str) -> None:
        self._reduced = (getattr, (owner, name))

    def __reduce__(self) -> Any:
        return self._reduced


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Metadata, "__init__"), (StorageMeta, "__class__"), (_MEM_FORMAT_ENCODING, "__class__"), (torch.Size, "numel")],
)
def test_getattr_in_a_table_gives_members_of_enumerations_alone(checkpoint: Path, owner: type, name: str) -> None:
    table = read_table(checkpoint)
    table.planner_data = _Attribute(owner, name)
    (checkpoint / METADATA).write_bytes(pickle.dumps(table))
    with pytest.raises(CorruptError, match=r"holds more than data \(builtins\.getattr\)"):
        read_table(checkpoint)


def test_a_bare_pickle_in_a_stream_is_read_from_its_start() -> None:
    stream = io.BytesIO()
    torch.save({"step": 1}, stream, _use_new_zipfile_serialization=False)
    assert load_data(stream) == {"step": 1}


# -- tables


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return write_full_tensors(tmp_path, {"w": torch.arange(6.0).view(3, 2)}, {}, {})


def test_a_tensor_of_which_a_part_is_missing_is_not_read(written: Path) -> None:
    table = read_table(written)
    assert torch.equal(StoredTensors(written, table).read("w"), torch.arange(6.0).view(3, 2))
    table.state_dict_metadata["w"].size = torch.Size([4, 2])
    with pytest.raises(CorruptError, match="does not hold all of w"):
        StoredTensors(written, table).read("w")


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd", "inner/a.distcp", "..", ".", 7])
def test_a_table_names_files_of_its_folder_alone(written: Path, name: Any) -> None:
    table = read_table(written)
    for place in table.storage_data.values():
        place.relative_path = name
    (written / METADATA).write_bytes(pickle.dumps(table))
    with pytest.raises(CorruptError, match="which is not a file in its folder"):
        read_table(written)


def test_a_path_is_read_as_every_python_writes_it(written: Path) -> None:
    """Python 3.13 names another module than those before and after it."""
    table = read_table(written)
    assert isinstance(table.storage_meta.checkpoint_id, Path)
    plain, moved = b"cpathlib\nPosixPath\n", b"cpathlib._local\nPosixPath\n"
    content = pickle.dumps(table, protocol=2).replace(moved, plain)
    assert content.count(plain) == 1
    for table_bytes in (content, content.replace(plain, moved)):
        (written / METADATA).write_bytes(table_bytes)
        assert read_table(written) == table


# -- what is planted


def archive(bomb: Any) -> bytes:
    stream = io.BytesIO()
    torch.save([bomb], stream)
    return stream.getvalue()


def plant_table(checkpoint: Path, bomb: Bomb) -> Path:
    (checkpoint / METADATA).write_bytes(pickle.dumps(bomb))
    return checkpoint / METADATA


def plant_inside_table(checkpoint: Path, bomb: Bomb) -> Path:
    table = read_table(checkpoint)
    table.planner_data = bomb
    (checkpoint / METADATA).write_bytes(pickle.dumps(table))
    return checkpoint / METADATA


def plant_entries(checkpoint: Path, bomb: Any, names: set[str]) -> Path:
    """Append a bomb to a file of tensors, and make the table name it as these entries, which are new or replaced."""
    table = read_table(checkpoint)
    anywhere = next(iter(table.storage_data.values()))
    for name in names - table.state_dict_metadata.keys():
        table.state_dict_metadata[name] = BytesStorageMetadata()
        table.storage_data[MetadataIndex(name)] = copy.copy(anywhere)
    for index, place in table.storage_data.items():
        if index.fqn in names:
            file = checkpoint / place.relative_path
            object.__setattr__(place, "offset", file.stat().st_size)
            object.__setattr__(place, "length", len(archive(bomb)))
            file.write_bytes(file.read_bytes() + archive(bomb))
    (checkpoint / METADATA).write_bytes(pickle.dumps(table))
    return file.with_name("__0_")  # whichever of the rank's files


def plant_objects(checkpoint: Path, bomb: Bomb) -> Path:
    """Where FP8's scales are, and the plain values of later versions of megatron-core."""
    return plant_entries(checkpoint, bomb, {"layer.fp8_scales/shard_0_1"})


def plant_tensor(checkpoint: Path, bomb: Bomb) -> Path:
    return plant_entries(checkpoint, bomb, {WEIGHT})


def plant_common(checkpoint: Path, bomb: Bomb) -> Path:
    if not (checkpoint / COMMON).exists():  # this megatron-core keeps plain values among the tensors
        stored = read_table(checkpoint).state_dict_metadata
        return plant_entries(checkpoint, bomb, {name for name in stored if name.startswith(COMMON_STATE)})
    torch.save({"progress": bomb}, checkpoint / COMMON)
    return checkpoint / COMMON


# -- who reads


def resume(run: Values, tmp_path: Path) -> list[str]:
    return ["train", "--config", str(write_config(tmp_path / "config.yaml", run))]


def convert(run: Values, tmp_path: Path) -> list[str]:
    return ["convert", run["training"]["run_dir"], str(tmp_path / "out"), "--to", "reference", "--no-verify"]


Reader = Callable[[Values, Path], list[str]]
Plant = Callable[[Path, Bomb], Path]


@pytest.mark.parametrize("plant", [plant_table, plant_inside_table, plant_objects, plant_common, plant_tensor])
@pytest.mark.parametrize("reader", [resume, convert], ids=lambda reader: reader.__name__)
def test_a_checkpoint_made_to_do_harm_is_refused(
    reader: Reader, plant: Plant, run: Values, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tests/faults/test_hostile_files.py` has the other readers, which read by the same functions."""
    file = plant(checkpoint, Bomb(tmp_path / "marker"))
    write_manifest(checkpoint, 2)  # as whoever changes a file on purpose would
    capsys.readouterr()
    assert main(reader(run, tmp_path)) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert not (tmp_path / "marker").exists()
    named = checkpoint if plant is plant_tensor else file  # torch's reader names no file
    assert str(named) in line and "holds more than" in line and "; use " in line


# -- the loading itself, behind these checks


@pytest.mark.parametrize("plant", [plant_tensor, plant_common], ids=lambda plant: plant.__name__)
def test_megatron_core_and_torch_load_data_alone(
    plant: Plant,
    run: Values,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored_files, "check_plain_values", lambda *_, **__: None)
    file = plant(checkpoint, Bomb(tmp_path / "marker"))
    write_manifest(checkpoint, 2)  # as whoever changes a file on purpose would
    assert main(resume(run, tmp_path)) == 3
    assert not (tmp_path / "marker").exists()
    message = capsys.readouterr().err
    assert str(file.parent) in message and "holds more than data" in message


def test_megatron_core_and_torch_do_not_read_the_table_again(
    run: Values, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = read_table(checkpoint)
    monkeypatch.setattr(stored_files, "read_table", lambda _: table)
    monkeypatch.setattr(stored_files, "check_stored", lambda *_, **__: None)
    plant_table(checkpoint, Bomb(tmp_path / "marker"))
    write_manifest(checkpoint, 2)
    assert main(resume(run, tmp_path)) == 0
    assert not (tmp_path / "marker").exists()


def refusal(values: dict[str, Any]) -> str:
    """What a rank says when it refuses to go on with a run."""
    with pytest.raises(CorruptError) as caught:
        train(values)
    return str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_refuses_all_do(run_on_ranks: RunOnRanks, run: Values, tmp_path: Path, rank: int) -> None:
    """Each looks through a share of the objects: none is left waiting."""
    values = {**run, "parallel": {**run["parallel"], "data_parallel_size": 2}}
    values["training"] = {**values["training"], "run_dir": str(tmp_path / "two")}
    run_on_ranks(2, train, values)
    values["training"]["train_iters"] = 4
    checkpoint = find_checkpoint(tmp_path / "two")
    for number in range(2):
        plant_entries(checkpoint, Bomb(tmp_path / "marker") if number == rank else 0, {f"object/shard_{number}_2"})
    write_manifest(checkpoint, 3)
    message, others = run_on_ranks(2, refusal, values)
    assert message == others and "holds more than data" in message
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("stated", ["{}", '{"sharded_backend": "zarr"}', "[]"])
def test_a_format_that_is_not_stated_or_another_is_refused(stated: str, tmp_path: Path) -> None:
    (tmp_path / MEGATRON_METADATA).write_text('{"sharded_backend": "torch_dist"}')
    check_format(tmp_path)
    (tmp_path / MEGATRON_METADATA).write_text(stated)
    with pytest.raises(CorruptError, match=MEGATRON_METADATA):
        check_format(tmp_path)
