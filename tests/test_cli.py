"""Bad input, as a user meets it: a line for each problem, exit code 2, nothing written."""

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_fanformer.cli import PROGRAM, main
from megatron_fanformer.train.config import load_config
from tests.conftest import REFERENCE
from tests.small_runs import ROOT, small_run, start_command, write_config, write_tokens

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
        (["check-node", "--json"], "check-node is no verb any more; start examples/check_nodes.py by torchrun or srun"),
        (["train"], "required: --config"),
        (["convert", str(REFERENCE / "atl"), str(ROOT), "--to", "hf"], " already exists; name a folder that does not"),
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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("--nonsense", "'--nonsense' is not an override; write --section.field VALUE"),
        ("--training.seed", "--training.seed has no value; write --section.field VALUE"),
        ("--training.seed [", "--training.seed '[' is not a valid YAML value; quote it"),
        ("--runtime.device cuda", "runtime.device is cuda"),
        ("--model.preset fanformer-2b", "model.preset is … fanformer-1b"),
        (
            "--training.global_batch_size 7 --parallel.data_parallel_size 2",
            "training.global_batch_size 7 is not a multiple … 2 x 2 = 4; the nearest is 8",
        ),
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


@pytest.mark.parametrize(("text", "message"), [("- a\n- b\n", "holds no configuration"), ("a: [", "is not valid YAML")])
def test_a_file_that_is_no_configuration(refused: Refused, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    one_line(refused("train", "--config", "config.yaml"), message)


def test_problems_of_sound_values_and_missing_files_are_reported_together(refused: Refused, config: str) -> None:
    overrides = ["--training.global_batch_size", "5", "--checkpoint.load", "none", "--schedule.lr_warmup_iters", "30"]
    lines = refused("train", "--config", config, *overrides)
    fields = ["training.global_batch_size", "schedule.lr_warmup_iters", "checkpoint.load:"]
    assert [line.split()[0] for line in lines] == fields


def test_the_conversion_script_is_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(ROOT / "tools" / "convert_checkpoint.py"))
    assert script["main"]([str(REFERENCE / "atl"), str(tmp_path / "out"), "--to", "megatron"]) == 0
    wrote, verified = capsys.readouterr().out.splitlines()
    assert wrote == f"wrote {tmp_path / 'out'}" and verified.startswith("verified: ")
    assert (tmp_path / "out" / "checkpoints" / "latest").is_file()
