"""Runs and checkpoints described and verified; every part of one damaged in turn."""

import dataclasses
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.full_tensors import write_full_tensors
from megatron_fanformer.checkpoint.manifest import MANIFEST, write_manifest
from megatron_fanformer.checkpoint.stored_files import METADATA, read_table, stored_parts, tensors_of
from megatron_fanformer.convert.name_table import expected_shapes
from megatron_fanformer.inspect import checkpoint as checkpoints
from megatron_fanformer.model.config import FANConfig
from tests.convert.test_hostile import Bomb
from tests.inspect.conftest import TOKENIZER, Inspect
from tests.inspect.test_dataset import flip, refused
from tests.small_runs import RunOnRanks, small_run, write_tokens
from tests.tiny import tiny_model
from tests.train.test_trainer import train

QK_AND_V = tiny_model(num_query_groups=2, fan=FANConfig(placement="qk_and_v", v_p_ratio=0.125))


@pytest.fixture(scope="module")
def trained(run_on_ranks: RunOnRanks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps at tensor parallel 2, with two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    values = small_run(
        write_tokens(folder / "tokens"),
        folder / "run",
        parallel={"tensor_model_parallel_size": 2},
        schedule={"lr_warmup_iters": 0},
        data={"tokenizer": str(TOKENIZER)},
        training={"train_iters": 4},
        checkpoint={"save_interval": 2},
    )
    run_on_ranks(2, train, values)
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.parametrize("path", [".", "checkpoints/step-00000002"])
def test_what_is_said_of_a_run_and_a_checkpoint(inspect: Inspect, trained: Path, path: str) -> None:
    output = inspect(trained / path, "--json")
    assert (output.code, output.error) == (0, "")
    facts = json.loads(output.out)
    step, checkpoint = (2, facts) if "step" in path else (4, *facts["parts"])
    if "step" not in path:
        assert (facts["kind"], facts["last_metrics"]["step"]) == ("run", 4)
        assert facts["checkpoints"] == ["step-00000002", "step-00000004"]
    assert (checkpoint["kind"], checkpoint["step"], checkpoint["consumed_samples"]) == ("checkpoint", step, 4 * step)
    assert checkpoint["model"]["parameters"] == run_folder.saved_model(Path(checkpoint["path"])).num_parameters
    assert checkpoint["model"]["fan"]["p_ratio"] == 0.25
    assert checkpoint["layout"]["tensor_model_parallel_size"] == 2
    assert (checkpoint["dtype"], checkpoint["tokenizer"]) == ("fp32", "tokenizer.json")
    assert checkpoint["optimizer_tensors"] == 2 * checkpoint["tensors"]
    text = inspect(trained / path).out
    assert f"step-{step:08d}: checkpoint\n  step               {step}\n  consumed samples   {4 * step}\n" in text
    assert ("    state              complete\n" in text) == ("step" not in path)


def test_a_run_without_checkpoints(inspect: Inspect, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    output = inspect(run)
    assert (output.code, output.error) == (0, "")
    assert "checkpoints  none\n" in output.out
    assert inspect(run, "--verify").code == 2


@pytest.mark.parametrize("path", [".", "checkpoints/step-00000004"])
def test_a_checkpoint_that_its_run_removes_meanwhile_is_not_called_corrupt(
    inspect: Inspect, run: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, check = run / "checkpoints" / "step-00000004", checkpoints.check_stored

    def removing(checkpoint: Path, **options: Any) -> None:
        shutil.rmtree(gone)
        check(checkpoint, **options)

    monkeypatch.setattr(checkpoints, "check_stored", removing)
    output = inspect(run / path, "--verify")
    assert (output.code, output.out) == (2, "") and f"{gone} was removed while it was read" in output.error


def test_a_flipped_bit_of_any_tensor(inspect: Inspect, run: Path) -> None:
    """By the manifest. Without one the archives' padding may change unseen: a tensor's bytes are amid its archive."""
    checkpoint = run / "checkpoints" / "step-00000004"
    flip(checkpoint / "__0_0.distcp", 0)
    refused(inspect(run, "--verify"), checkpoint / "__0_0.distcp", "is damaged (its SHA-256")
    assert inspect(run).code in (0, 3)  # torch may meet it in the plain values, or not
    flip(checkpoint / "__0_0.distcp", 0)
    (checkpoint / MANIFEST).unlink()
    weights = [part for part in stored_parts(read_table(checkpoint)) if part.length > 4000]
    assert len({part.file for part in weights}) > 1
    for part in weights[::3]:
        flip(checkpoint / part.file, part.offset + part.length // 2)
        refused(inspect(run, "--verify"), checkpoint / part.file, f"is damaged in {part.name}")
        flip(checkpoint / part.file, part.offset + part.length // 2)
    assert inspect(run, "--verify").code == 0


def test_a_tensor_of_which_a_part_is_not_listed(inspect: Inspect, run: Path) -> None:
    checkpoint = run / "checkpoints" / "step-00000004"
    table = read_table(checkpoint)
    name = next(name for name, value in tensors_of(table).items() if len(value.chunks) > 1)
    table.state_dict_metadata[name].chunks.pop()
    (checkpoint / METADATA).write_bytes(pickle.dumps(table))
    write_manifest(checkpoint, 4)
    refused(inspect(run, "--verify"), checkpoint / METADATA, f"does not hold all of {name}")


@pytest.mark.parametrize("name", ["linear_qk.weight", "fan.v_linear.bias"])
@pytest.mark.parametrize("fault", ["missing", "a row short"])
def test_the_weights_of_the_second_placement_are_checked(
    inspect: Inspect, name: str, fault: str, tmp_path: Path
) -> None:
    tensors = {key: torch.randn(shape) for key, shape in expected_shapes(QK_AND_V, "megatron").items()}
    config = {"model": dataclasses.asdict(QK_AND_V)}
    write_full_tensors(tmp_path / "sound", tensors, config, {})
    assert inspect(tmp_path / "sound", "--verify").code == 0
    changed = f"decoder.layers.1.self_attention.{name}"
    tensors[changed] = tensors[changed][1:]
    if fault == "missing":
        del tensors[changed]
    write_full_tensors(tmp_path / "run", tensors, config, {})
    refused(
        inspect(tmp_path / "run", "--verify"), f".metadata has {changed} of shape", "where the model in config.yaml"
    )


@pytest.mark.parametrize("options", [[]])
@pytest.mark.parametrize("place", ["whole", "inside", "plain values"])
def test_a_checkpoint_made_to_do_harm(
    inspect: Inspect, run: Path, tmp_path: Path, place: str, options: list[str]
) -> None:
    """Its table and its plain values are pickles, which are read as data alone."""
    checkpoint, bomb = run / "checkpoints" / "step-00000004", Bomb(tmp_path / "marker")
    file = checkpoint / ("common.pt" if place == "plain values" else ".metadata")
    if not file.exists():
        pytest.skip("this megatron-core keeps plain values among the tensors")
    if place == "plain values":
        torch.save({"progress": bomb}, file)
    elif place == "whole":
        file.write_bytes(pickle.dumps(bomb))
    else:
        table = pickle.loads(file.read_bytes())
        table.planner_data = bomb
        file.write_bytes(pickle.dumps(table))
    write_manifest(checkpoint, 4)
    refused(inspect(run, *options), file, "holds more than")
    assert not (tmp_path / "marker").exists()
