"""Bad input, as a user meets it: a line for each problem, exit code 2, nothing written."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fanformer.checkpoint.manifest import write_manifest
from megatron_fanformer.cli import PROGRAM, main
from megatron_fanformer.train.config import load_config
from tests.conftest import REFERENCE, SAMPLES
from tests.small_runs import ROOT, small_run, start_command, write_config, write_tokens

TOKENIZER = SAMPLES / "tokenizers" / "allenai_gpt-neox-olmo-dolma-v1_5.json"

Refused = Callable[..., list[str]]


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Run a command that is to be refused; the lines that it says."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> list[str]:
        before = contents(tmp_path)
        capsys.readouterr()
        assert main(arguments) == 2
        message = capsys.readouterr()
        # what machine and data are refused for comes after the second
        assert message.out in ("", "starting 1 rank on this machine\n")
        assert contents(tmp_path) == before
        lines = message.err.splitlines()
        assert all(line.startswith(f"{PROGRAM}: ") for line in lines), lines
        return [line.removeprefix(f"{PROGRAM}: ") for line in lines]

    return run


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A configuration that is in order, of a run that does not exist yet."""
    return str(write_config(tmp_path / "config.yaml", small_run(write_tokens(tmp_path / "tokens"), tmp_path / "run")))


def one_line(lines: list[str], *parts: str) -> None:
    assert len(lines) == 1, lines
    for part in parts:
        assert part in lines[0]


# -- the command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: VERB"),
        (["tran"], "invalid choice: 'tran'"),
        (["check-node", "--json"], "check-node is no verb any more; start examples/check_nodes.py by torchrun or srun"),
        (["train"], "required: --config"),
        (["prepare", "x", "--output", "y", "--tokenizer", "z", "--workers", "two"], "invalid int value: 'two'"),
        (["convert", "x", "y", "--to", "zip"], "invalid choice: 'zip'"),
    ],
)
def test_a_command_line_that_is_no_command(refused: Refused, arguments: list[str], message: str) -> None:
    one_line(refused(*arguments), message)


def test_the_installed_command_exits_with_the_same_code_and_line(tmp_path: Path, config: str) -> None:
    before = contents(tmp_path)
    process = start_command("train", "--config", config, "--model.hiden_size", "64")
    output, errors = process.communicate()
    assert (process.returncode, output) == (2, "")
    assert errors == f"{PROGRAM}: unknown configuration key model.hiden_size; did you mean model.hidden_size?\n"
    assert contents(tmp_path) == before


# -- a configuration's values


NO_PRESET = "model.preset is … fanformer-1b"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("--nonsense", "'--nonsense' is not an override; write --section.field VALUE"),
        ("--training.seed", "--training.seed has no value; write --section.field VALUE"),
        ("--training.seed [", "--training.seed '[' is not a valid YAML value; quote it"),
        ("--data.train_data a", 'data.train_data is "a"; it must be a list of text or integers or numbers'),
        ("--training.train_iters 0", "training.train_iters is 0; it must be at least 1"),
    ],
)
def test_a_value_of_the_wrong_kind(refused: Refused, config: str, overrides: str, message: str) -> None:
    assert refused("train", "--config", config, *overrides.split()) == [message]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("--runtime.device cuda", "runtime.device is cuda"),
        ("--model.preset fanformer-2b", NO_PRESET),
        ("--model.fan.p_ratio 0.51", "model.fan.p_ratio is 0.51; it must lie in [0, 0.5]"),
        ("--optimizer.name Adam", "optimizer.name is 'Adam', which is no optimizer here; did you mean adamw?"),
        (
            "--training.global_batch_size 7 --parallel.data_parallel_size 2",
            "training.global_batch_size 7 is not a multiple … 2 x 2 = 4; the nearest is 8",
        ),
        ("--data.tokenizer none.model", "data.tokenizer: none.model does not exist"),
        ("--checkpoint.load none", "checkpoint.load: none does not exist; name a run's folder or one checkpoint"),
        ("--training.run_dir config.yaml", "training.run_dir config.yaml is a file; name a folder"),
    ],
)
def test_a_value_that_is_refused(refused: Refused, config: str, overrides: str, message: str) -> None:
    one_line(refused("train", "--config", config, *overrides.split()), *message.split(" … "))


def test_an_empty_section_has_its_defaults(tmp_path: Path, config: str) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text(Path(config).read_text() + "checkpoint:\n  # save_interval: 10\n")
    assert load_config(file).checkpoint.save_interval is None


def test_missing_values_are_named(refused: Refused, tmp_path: Path) -> None:
    values = small_run("tokens", tmp_path / "run")
    del values["training"], values["model"]["vocab_size"]
    file = write_config(tmp_path / "config.yaml", values)
    missing = [line.split(" is missing;")[0] for line in refused("train", "--config", str(file))]
    assert missing == ["model.vocab_size", "training.run_dir", "training.global_batch_size"]


@pytest.mark.parametrize(("text", "message"), [("- a\n- b\n", "holds no configuration"), ("a: [", "is not valid YAML")])
def test_a_file_that_is_no_configuration(refused: Refused, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    one_line(refused("train", "--config", "config.yaml"), message)


def test_problems_of_sound_values_and_missing_files_are_reported_together(refused: Refused, config: str) -> None:
    overrides = ["--training.global_batch_size", "5", "--checkpoint.load", "none", "--schedule.lr_warmup_iters", "30"]
    lines = refused("train", "--config", config, *overrides)
    fields = ["training.global_batch_size", "schedule.lr_warmup_iters", "checkpoint.load:"]
    assert [line.split()[0] for line in lines] == fields


# -- the layout


@pytest.mark.parametrize(
    ("degrees", "world"),
    [(["--parallel.tensor_model_parallel_size", "2"], 3), (["--parallel.data_parallel_size", "2"], 4)],
)
def test_a_world_that_the_layout_does_not_fill(
    refused: Refused, config: str, monkeypatch: pytest.MonkeyPatch, degrees: list[str], world: int
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world))
    one_line(refused("train", "--config", config, *degrees), str(world))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tp=3", "parallel.tensor_model_parallel_size 3 does not divide model.num_attention_heads 4; choose one of"),
        ("stages=2", "unknown configuration key stages; the keys here are tensor_model_parallel_size, "),
        ("tp=2,fan=sequence", "fan_form is sequence without sequence parallelism"),
        ("dp=3", "training.global_batch_size 4 is not a multiple of"),
    ],
)
def test_a_layout_that_cannot_be_compared(refused: Refused, config: str, layout: str, message: str) -> None:
    lines = refused("parity", "--config", config, "--layouts", "tp=2", layout)
    assert lines[0].startswith(f"layout {layout!r}: ")
    assert message in lines[0]


# -- files


def test_missing_data_is_named(refused: Refused, config: str) -> None:
    lines = refused("train", "--config", config, "--data.train_data", "[none]", "--data.valid_data", "{web: [nil]}")
    assert {line.split(" does not exist")[0] for line in lines} == {
        "data.train_data: none.bin",
        "data.train_data: none.idx",
        "data.valid_data.web: nil.bin",
        "data.valid_data.web: nil.idx",
    }


@pytest.fixture
def started_run(tmp_path: Path, config: str) -> Path:
    """The folder of a run with a checkpoint of 0 bytes: what is looked at here is its configuration alone."""
    values = load_config(Path(config)).as_dict()
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata.json").write_text("{}")
    (checkpoint.parent / "latest").write_text(checkpoint.name)
    write_config(checkpoint / "config.yaml", values)
    write_manifest(checkpoint, 1)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (("model.num_layers", "4"), "model.num_layers is 4, but the checkpoint"),
        (("training.seed", "5"), "training.seed is 5, but the run in"),
    ],
)
def test_a_runs_folder_whose_run_is_another(
    refused: Refused, config: str, started_run: Path, override: tuple[str, str], message: str
) -> None:
    name, value = override
    one_line(refused("train", "--config", config, f"--{name}", value), message, str(started_run))


@pytest.mark.parametrize("verb", [["convert", "none", "out", "--to", "hf"], ["generate", "none", "--prompt", "a"]])
def test_a_checkpoint_that_is_none(refused: Refused, verb: list[str]) -> None:
    one_line(refused(*verb), "none does not exist; name a run's folder, one checkpoint of a run")


def test_a_conversion_into_a_folder_that_exists(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    lines = refused("convert", str(REFERENCE / "atl"), "there", "--to", "hf")
    one_line(lines, "there already exists; name a folder that does not")


def test_the_conversion_script_is_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("convert_checkpoint", ROOT / "tools" / "convert_checkpoint.py")
    assert spec is not None and spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.main([str(REFERENCE / "atl"), str(tmp_path / "out"), "--to", "megatron"]) == 0
    wrote, verified = capsys.readouterr().out.splitlines()
    assert wrote == f"wrote {tmp_path / 'out'}" and verified.startswith("verified: ")
    assert (tmp_path / "out" / "checkpoints" / "latest").is_file()
