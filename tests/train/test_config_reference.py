"""`config`: every field, the resolved configuration."""

from pathlib import Path

import pytest
import yaml

from megatron_fanformer.cli import main
from megatron_fanformer.train.config import load_config
from megatron_fanformer.train.config_reference import field_list, run_sections
from tests.small_runs import ROOT, write_config


def test_every_field_has_a_docstring_and_is_listed_in_80_columns() -> None:
    assert all(field.text for _, _, fields in run_sections() for field in fields)
    listed = field_list()
    assert "  model.num_layers  an integer; must be given\n      Transformer layers.\n" in listed
    assert "  optimizer.adam_eps  a finite number; default 1e-5\n" in listed


def test_the_verb_prints_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--resolved"]) == main(["config", "--from-megatron", "pretrain.sh"]) == 2
    assert main(["config"]) == 0
    assert capsys.readouterr().out == field_list() + "\n"
    file = ROOT / "examples" / "fanformer-1b.yaml"
    assert main(["config", "--resolved", "--config", str(file), "--optimizer.lr", "1e-3"]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed) == load_config(file, ["--optimizer.lr", "1e-3"]).as_dict()
    again = tmp_path / "whole.yaml"
    again.write_text(printed)
    assert load_config(again).as_dict() == yaml.safe_load(printed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--parallel.tensor_model_parallel_size", "3"], "does not divide model.num_attention_heads 16"),
        (["--data.train_data", "[]"], "data.train_data is empty"),
    ],
)
def test_a_resolved_configuration_is_one_that_can_train(
    change: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a login node, which has neither the data nor the GPUs."""
    assert main(["config", "--resolved", "--config", str(ROOT / "examples" / "fanformer-1b.yaml"), *change]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("core", ["0.16", "0.19"])
def test_the_configuration_of_an_earlier_run_is_read(core: str, tmp_path: Path) -> None:
    """Fields that have moved or gone since are in it."""
    file = ROOT / "tests" / "samples" / "checkpoints" / f"megatron-core-{core}" / "config.yaml"
    values = yaml.safe_load(file.read_text())
    values["parallel"]["transformer_impl"] = values["kernels"].pop("transformer_impl")
    values["runtime"]["cpu_shared_memory_collectives"] = True
    values["evaluation"]["perplexity"]["batches"] = None
    config = load_config(write_config(tmp_path / "config.yaml", values), report=lambda _: None)
    assert config.kernels.transformer_impl == values["parallel"]["transformer_impl"]
    assert config.evaluation.perplexity.limit_tokens is None


def test_the_home_directory_may_stand_in_any_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    changes = ["--training.run_dir", "~/run", "--data.train_data", "[~/a, ~b, ~/c]", "--data.valid_data", "{v: [~/d]}"]
    config = load_config(ROOT / "examples" / "fanformer-1b.yaml", changes)
    assert config.data.train_data == [f"{tmp_path}/a", "~b", f"{tmp_path}/c"]
    assert config.data.valid_data == {"v": [f"{tmp_path}/d"]}
    assert config.training.run_dir == f"{tmp_path}/run"
    assert main(["convert", "~/no-model", "~/out", "--to", "hf"]) == 2
    assert not Path("~").exists()
