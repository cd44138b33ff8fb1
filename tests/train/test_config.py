"""`model.preset: from-checkpoint`: the model of what a run starts from, or goes on from."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.errors import InputError
from megatron_fanformer.model.config import FANConfig, FANformerConfig
from megatron_fanformer.model.rope_scaling import RopeScalingConfig
from megatron_fanformer.train.config import RunConfig, load_config
from megatron_fanformer.train.config_reference import resolved_text
from tests.small_runs import write_config
from tests.tiny import tiny_model

MODEL = tiny_model(num_layers=3, num_query_groups=2, fan=FANConfig(p_ratio=0.125), seq_length=64)


def write_saved_model(run: Path, model: FANformerConfig, step: int = 7) -> Path:
    """What is read of a run to know its model; returns its one checkpoint."""
    checkpoint = run / run_folder.CHECKPOINTS / run_folder.checkpoint_name(step)
    checkpoint.mkdir(parents=True)
    for name in (run_folder.MEGATRON_METADATA, run_folder.MANIFEST):
        (checkpoint / name).touch()
    (checkpoint.parent / run_folder.LATEST).write_text(f"{checkpoint.name}\n")
    for folder in (run, checkpoint):
        (folder / run_folder.CONFIG).write_text(yaml.safe_dump({"model": dataclasses.asdict(model)}))
    return checkpoint


def loaded(folder: Path, load: str | None, **model: Any) -> RunConfig:
    values = {
        "model": {"preset": "from-checkpoint", **model},
        "data": {"train_data": ["none"]},
        "training": {"run_dir": str(folder / "run"), "train_iters": 1, "global_batch_size": 1},
        "checkpoint": {"load": load},
    }
    return load_config(write_config(folder / "config.yaml", values))


def test_the_model_is_that_of_whatever_checkpoint_load_names(tmp_path: Path) -> None:
    checkpoint = write_saved_model(tmp_path / "base", MODEL)
    for load in (tmp_path / "base", checkpoint):
        assert loaded(tmp_path, str(load)).model == MODEL
    resolved = yaml.safe_load(resolved_text(tmp_path / "config.yaml", ["--model.seq_length", "128"]))
    assert resolved["model"] == {**dataclasses.asdict(MODEL), "seq_length": 128}


def test_a_run_that_has_begun_goes_on_without_what_it_started_from(tmp_path: Path) -> None:
    own = dataclasses.replace(MODEL, seq_length=128)
    write_saved_model(tmp_path / "run", own)
    assert loaded(tmp_path, str(tmp_path / "removed"), seq_length=128).model == own


def test_a_longer_context_states_its_positions_anew(tmp_path: Path) -> None:
    scaled = RopeScalingConfig(rope_type="linear", factor=2)
    write_saved_model(tmp_path / "base", dataclasses.replace(MODEL, rope_scaling=scaled))
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    longer = loaded(tmp_path, str(tmp_path / "base"), seq_length=256, rope_scaling=yarn).model
    assert longer == dataclasses.replace(MODEL, seq_length=256, rope_scaling=RopeScalingConfig(**yarn))  # type: ignore[arg-type]
    assert loaded(tmp_path, str(tmp_path / "base")).model.rope_scaling == scaled


@pytest.mark.parametrize(
    ("load", "stated", "message"),
    [
        ("base", {"hidden_size": 64}, "model.hidden_size is stated, but model.preset is from-checkpoint"),
        ("base", {"hidden": 64}, "unknown configuration key model.hidden; did you mean"),
        (None, {}, "model.preset is from-checkpoint, but checkpoint.load names none"),
        ("none", {}, "none does not exist"),
        ("export", {}, "is a Hugging Face folder of a FANformer; name a run's folder"),
    ],
)
def test_bad_input_is_a_line(tmp_path: Path, load: str | None, stated: dict[str, Any], message: str) -> None:
    write_saved_model(tmp_path / "base", MODEL)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text('{"model_type": "fanformer"}')
    with pytest.raises(InputError) as refused:
        loaded(tmp_path, None if load is None else str(tmp_path / load), **stated)
    (line,) = str(refused.value).splitlines()
    assert message in line
