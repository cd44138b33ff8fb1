"""Runs and checkpoints described and verified; every part of one damaged in turn."""

import dataclasses
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.full_tensors import write_full_tensors
from megatron_fanformer.checkpoint.manifest import write_manifest
from megatron_fanformer.checkpoint.run_lock import run_lock
from megatron_fanformer.checkpoint.stored_files import METADATA, read_table, tensors_of
from megatron_fanformer.convert.name_table import expected_shapes
from megatron_fanformer.inspect.checkpoint import read_progress
from megatron_fanformer.model.config import FANConfig
from tests.checkpoint.stores import save
from tests.conftest import REFERENCE
from tests.inspect.conftest import TOKENIZER, Inspect
from tests.inspect.test_dataset import flip, refused
from tests.small_runs import RunOnRanks, small_run, write_config, write_tokens
from tests.tiny import tiny_model
from tests.train.test_trainer import train
from tests.whole_models import export_huggingface, read_reference, read_weights, reference_to_megatron

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
        assert (facts["kind"], facts["progress"]["step"]) == ("run", 4)
        assert facts["checkpoints"] == ["step-00000002", "step-00000004"]
    assert (checkpoint["kind"], checkpoint["step"], checkpoint["consumed_samples"]) == ("checkpoint", step, 4 * step)
    assert checkpoint["model"]["parameters"] == run_folder.saved_model(Path(checkpoint["path"])).num_parameters
    assert checkpoint["model"]["fan"]["p_ratio"] == 0.25
    assert checkpoint["layout"]["tensor_model_parallel_size"] == 2
    assert (checkpoint["dtype"], checkpoint["tokenizer"]) == ("fp32", "tokenizer.json")
    assert checkpoint["optimizer_tensors"] == 2 * checkpoint["tensors"]
    text = inspect(trained / path).out
    assert f"step-{step:08d}: checkpoint\n  step               {step}\n  consumed_samples   {4 * step}\n" in text
    assert ("    state         complete\n" in text) == ("step" not in path)


def test_a_run_without_checkpoints(inspect: Inspect, run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    output = inspect(run)
    assert (output.code, output.error) == (0, "")
    assert "checkpoints  none\n" in output.out
    assert inspect(run, "--verify").code == 2


def test_a_flipped_bit_of_any_tensor(inspect: Inspect, run: Path) -> None:
    file = run / "checkpoints" / "step-00000004" / "__0_0.distcp"
    flip(file, 0)
    refused(inspect(run, "--verify"), file, "is damaged (its SHA-256")
    flip(file, 0)
    assert inspect(run, "--verify").code == 0


def test_a_tensor_of_which_a_part_is_not_listed(inspect: Inspect, run: Path) -> None:
    checkpoint = run / "checkpoints" / "step-00000004"
    table = read_table(checkpoint)
    name = next(name for name, value in tensors_of(table).items() if len(value.chunks) > 1)
    table.state_dict_metadata[name].chunks.pop()
    (checkpoint / METADATA).write_bytes(pickle.dumps(table))
    write_manifest(checkpoint, 4)
    refused(inspect(run, "--verify"), checkpoint / METADATA, f"does not hold all of {name}")


@pytest.mark.parametrize("fault", ["missing", "a row short"])
def test_the_weights_of_the_second_placement_are_checked(inspect: Inspect, fault: str, tmp_path: Path) -> None:
    tensors = {key: torch.randn(shape) for key, shape in expected_shapes(QK_AND_V, "megatron").items()}
    changed = "decoder.layers.1.self_attention.fan.v_linear.bias"
    tensors[changed] = tensors[changed][1:]
    if fault == "missing":
        del tensors[changed]
    write_full_tensors(tmp_path / "run", tensors, {"model": dataclasses.asdict(QK_AND_V)}, {})
    refused(
        inspect(tmp_path / "run", "--verify"), f".metadata has {changed} of shape", "where the model in config.yaml"
    )


# -- exports


CASE = REFERENCE / "fanformer-untied-p0125"


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    config, tensors = read_reference(CASE)
    folder = tmp_path / "export"
    export_huggingface(
        config, reference_to_megatron(tensors, config), folder, dtype=torch.bfloat16, max_shard_size="100KB"
    )
    return folder


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CASE, tmp_path / "reference"))


def test_a_hugging_face_folder_in_shards(inspect: Inspect, exported: Path) -> None:
    output = inspect(exported, "--verify")
    assert (output.code, output.error) == (0, "")
    assert f"{exported}: hf\n" in output.out
    assert " p_ratio 0.125, activation none, bias yes, placement qkv\n" in output.out
    assert "safetensors have no checksum of their bytes" in output.out
    facts = json.loads(inspect(exported, "--json").out)
    assert (facts["kind"], facts["dtype"], facts["tokenizer"]) == ("hf", "bfloat16", None)
    assert len(facts["shards"]) > 2
    assert facts["stored_parameters"] == sum(tensor.numel() for tensor in read_weights(exported).values())
    shutil.copy(TOKENIZER, exported / "tokenizer.json")
    (exported / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    facts = json.loads(inspect(exported, "--json").out)
    assert (facts["tokenizer"], facts["chat_template"]) == ("tokenizer.json", True)


def test_a_reference_checkpoint(inspect: Inspect, reference: Path) -> None:
    facts = json.loads(inspect(reference, "--verify", "--json").out)
    config, tensors = read_reference(reference)
    assert (facts["kind"], facts["dtype"], facts["tensors"]) == ("reference", "float32", len(tensors))
    assert facts["model"]["parameters"] == config.num_parameters == facts["stored_parameters"]
    assert facts["model"]["fan"]["p_ratio"] == 0.125
    weights = safetensors.torch.load_file(reference / "model.safetensors")
    (reference / "model.safetensors").unlink()
    torch.save(weights, reference / "model.pt")
    output = inspect(reference, "--verify")
    assert output.code == 0
    assert "the CRC-32 of their bytes" in output.out
    flip(reference / "model.pt", (reference / "model.pt").stat().st_size // 2)
    refused(inspect(reference, "--verify"), "model.pt is damaged in its weights (CRC-32 of")


def test_a_tensor_that_is_missing_or_of_another_shape(inspect: Inspect, reference: Path) -> None:
    file, name = reference / "model.safetensors", "transformer.blocks.1.ff_out.weight"
    weights = safetensors.torch.load_file(file)
    whole = weights[name]
    weights[name] = whole[:, 1:].contiguous()
    safetensors.torch.save_file(weights, file)
    refused(inspect(reference, "--verify"), f"has {name} of shape ", "where its model has")
    del weights[name]
    safetensors.torch.save_file(weights, file)
    refused(inspect(reference, "--verify"), f"has {name} of shape none")


# -- how far a run has come

STEPS = 40
METRICS = [
    {"step": step, "loss": 9 - 0.1 * step, "tokens": 64 * step, "step_seconds": 0.1} for step in range(1, STEPS + 1)
]


def write_run(run: Path, metrics: list[dict[str, Any]], *, steps: int | None = STEPS) -> Path:
    write_config(run / "config.yaml", {"training": {"train_iters": steps}})
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in metrics))
    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_a_complete_run_is_summed_up(folder: Path) -> None:
    evaluated = {20: {"validation_loss/pages": 6.5}, 30: {"validation_loss/pages": 6.25}}
    write_run(folder, [entry | evaluated.get(entry["step"], {}) for entry in METRICS])
    events = [(4, "skipped"), (4, "skipped"), (2, "rewound"), (5, "something else")]
    (folder / "recovery.jsonl").write_text(
        "".join(f'{{"step": {step}, "event": "{event}"}}\n' for step, event in events)
    )
    save(folder, STEPS)
    assert read_progress(folder) == {
        **{"step": 40, "steps": 40, "state": "complete", "saved": 40, "tokens": 2560},
        **{"loss": pytest.approx(5.45), "validation": {"pages": 6.25}, "events": {"skipped": 2, "rewound": 1}},
        **{"step_seconds": 0.1, "seconds_left": None},
    }


def test_a_run_that_goes_on_has_time_left(folder: Path) -> None:
    write_run(folder, METRICS[:30])
    assert read_progress(folder)["state"] == "nothing runs: train goes on from the beginning"
    with run_lock(folder):
        progress = read_progress(folder)
    assert progress["seconds_left"] == pytest.approx(1.0)
    assert progress["state"].startswith("runs on ")
    assert read_progress(folder)["seconds_left"] is None


def test_steps_that_were_not_saved_are_taken_again(folder: Path) -> None:
    """A folder that was killed before its last checkpoint, or set back to an earlier one, is not complete."""
    write_run(folder, METRICS)
    newest = [save(folder, step) for step in (10, 20, 30)][-1]
    assert read_progress(folder)["state"] == "nothing runs: train goes on from step 30"
    (newest / run_folder.MEGATRON_METADATA).unlink()
    assert read_progress(folder)["saved"] == 20
    run_folder.point_to(newest.with_name("step-00000010"), [])
    assert read_progress(folder)["saved"] == 10


def test_what_cannot_be_read_is_left_out(folder: Path) -> None:
    skipped = {"step": 3, "skipped": "nan", "eval/c4/CrossEntropyLoss": 3.5}
    write_run(folder, [METRICS[0], {"step": 2, "loss": None}, skipped], steps=None)
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('null\n{"step": "4"}\n{"step": 5, "lo')
    progress = read_progress(folder)
    assert (progress["step"], progress["steps"], progress["loss"], progress["step_seconds"]) == (3, None, 8.9, 0.1)
    assert progress["validation"] == {"c4": 3.5}
    (folder / "config.yaml").write_text("[")
    (folder / "metrics.jsonl").unlink()
    progress = read_progress(folder)
    assert (progress["step"], progress["loss"]) == (0, None)
