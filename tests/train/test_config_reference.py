"""`config`: every field, the JSON schema against the shipped files, the resolved configuration."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fanformer.cli import main
from megatron_fanformer.errors import InputError
from megatron_fanformer.train.config import load_config
from megatron_fanformer.train.config_reference import field_list, run_schema, run_sections
from tests.small_runs import ROOT, small_run, write_config

EXAMPLES = sorted(set((ROOT / "examples").glob("*.yaml")) - {ROOT / "examples" / "kubernetes-jobset.yaml"})
KINDS = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def fits(value: Any, schema: dict[str, Any], whole: dict[str, Any]) -> bool:
    """Whether a value is valid, by the words of JSON schema that ours uses."""
    if "$ref" in schema:
        return fits(value, whole["$defs"][schema["$ref"].rpartition("/")[2]], whole)
    if "anyOf" in schema and not any(fits(value, choice, whole) for choice in schema["anyOf"]):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if not _is_kind(value, schema.get("type")):
        return False
    if isinstance(value, list):
        return all(fits(item, schema.get("items", {}), whole) for item in value)  # of a choice above, or here
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        rules = [(item, known.get(name, others)) for name, item in value.items()]
        has_all = set(schema.get("required", ())) <= value.keys()
        return has_all and all(rule if isinstance(rule, bool) else fits(item, rule, whole) for item, rule in rules)
    return True


def _is_kind(value: Any, kind: str | None) -> bool:
    if kind in ("integer", "number"):
        return isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
    return kind is None or isinstance(value, KINDS[kind])


def is_valid(values: Any) -> bool:
    schema = run_schema()
    return fits(values, schema, schema)


def test_every_field_has_a_docstring_and_is_listed_in_80_columns() -> None:
    assert all(field.text for _, _, fields in run_sections() for field in fields)
    listed = field_list()
    assert "  model.num_layers  integer; must be given\n      Transformer layers.\n" in listed
    assert "  optimizer.adam_eps  number; default 1e-5\n" in listed


def test_the_verb_prints_what_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    assert capsys.readouterr().out == field_list() + "\n"
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == run_schema()
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
def test_the_configuration_of_an_earlier_run_is_read(core: str) -> None:
    """Fields that have gone since are in it, with their defaults."""
    file = ROOT / "tests" / "samples" / "checkpoints" / f"megatron-core-{core}" / "config.yaml"
    assert "batches: null" in file.read_text() and "cpu_shared_memory_collectives" in file.read_text()
    config = load_config(file, report=lambda _: None)
    assert config.evaluation.perplexity.limit_tokens is None
    with pytest.raises(InputError, match=r"evaluation\.perplexity\.batches; .*limit_tokens"):
        load_config(file, ["--evaluation.perplexity.batches", "3"], report=lambda _: None)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "x.yaml"], "--output has no effect without --from-megatron"),
        (["--from-megatron", "pretrain.sh"], "pretrain.sh is no argument of pretrain_gpt.py"),
        (["--config", "x.yaml"], "--config has no effect without --resolved"),
        (["--model.seq_length", "3"], "--model.seq_length has no effect without --resolved"),
        (["--resolved"], "--resolved needs --config FILE"),
        (["--resolved", "--schema"], "not allowed with argument"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *arguments]) == 2
    assert message in capsys.readouterr().err


# -- the schema


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_the_shipped_files_fit_the_schema(file: Path) -> None:
    assert is_valid(yaml.safe_load(file.read_text()))


def test_what_the_trainer_takes_is_valid(tmp_path: Path) -> None:
    values = small_run("tokens", tmp_path)
    assert is_valid(values)
    assert is_valid({**values, "checkpoint": None})
    assert is_valid({**values, "parallel": {"device": "cpu", "cross_entropy_chunk_tokens": None}})
    assert is_valid(load_config(write_config(tmp_path / "config.yaml", values)).as_dict())


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("model", "hiden_size", 64),
        ("model", "num_layers", "2"),
        ("model", "preset", "fanformer-2b"),
        ("kernels", "transformer_impl", "apex"),
        ("optimizer", "lr", True),
        ("data", "train_data", "tokens"),
        ("runtime", "device", None),
    ],
)
def test_what_the_trainer_refuses_is_not(section: str, name: str, value: Any, tmp_path: Path) -> None:
    assert not is_valid(small_run("tokens", tmp_path, **{section: {name: value}}))
