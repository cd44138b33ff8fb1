"""Errors of a command are reported before torch and megatron-core are imported, which takes seconds."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.checkpoint.manifest import write_manifest
from megatron_fanformer.train.config import load_config
from tests.small_runs import ROOT, small_run, write_config, write_tokens

PROGRAM = """
import contextlib, io, json, sys
from megatron_fanformer.cli import main
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(arguments)
    imported = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "megatron", "transformers"})
    print(json.dumps([code, output.getvalue(), errors.getvalue(), imported]))
"""


def run(*commands: Sequence[str], begin: str = "", **environment: str) -> list[list[Any]]:
    """Run commands in one process; each one's exit code, output, errors, and what it imported that takes seconds."""
    command = [sys.executable, "-c", f"{begin}\n{PROGRAM}", json.dumps(commands)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


NO_CHECKPOINT = "none does not exist; name a run's folder"
REFUSED = [
    ("train --config CONFIG --model.hiden_size 64", "did you mean model.hidden_size?"),
    ("train --config none.yaml", "none.yaml cannot be read"),
    ("train --config CONFIG", "no-tokens.bin does not exist"),
    ("parity --config CONFIG --layouts tp=3", "layout 'tp=3': parallel.tensor_model_parallel_size 3 does not divide"),
    ("convert x y --to hf --speed 9", "unknown argument --speed"),
    ("generate none --prompt y", NO_CHECKPOINT),
    ("convert none out --to hf", NO_CHECKPOINT),
    ("evaluate none --perplexity own=none --layout tp=2", NO_CHECKPOINT),
]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """How commands end, one after the other in one process, whose start takes as long as all of them."""
    folder = tmp_path_factory.mktemp("refused")
    config = str(write_config(folder / "config.yaml", small_run(str(folder / "no-tokens"), folder / "run")))
    commands = [[config if word == "CONFIG" else word for word in arguments.split()] for arguments, _ in REFUSED]
    return {arguments: done for (arguments, _), done in zip(REFUSED, run(*commands), strict=True)}


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_a_command_that_is_refused(arguments: str, message: str, refusals: dict[str, list[Any]]) -> None:
    code, output, errors, imported = refusals[arguments]
    assert (code, output, imported) == (2, "", [])
    assert message in errors


def test_a_run_that_is_complete(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = write_config(tmp_path / "config.yaml", small_run(write_tokens(tmp_path / "tokens"), folder))
    checkpoint = folder / "checkpoints" / "step-00000020"
    checkpoint.mkdir(parents=True)
    (checkpoint / "metadata.json").write_text("{}")
    (checkpoint.parent / "latest").write_text(checkpoint.name)
    write_config(checkpoint / "config.yaml", load_config(config).as_dict())
    write_manifest(checkpoint, 20)
    before = sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*"))
    refused = {
        "--training.train_iters=19": "is at step 20; raise it",
        "--model.num_layers=4": "model.num_layers is 4, but the checkpoint",
        "--training.seed=5": "training.seed is 5, but the run in",
    }
    train = ["train", "--config", str(config)]
    complete, *others = run(train, *([*train, override] for override in refused))
    remedy = "raise training.train_iters to train on, or name another training.run_dir"
    assert complete == [0, f"complete: 20 of 20 steps in {folder}; {remedy}\n", "", []]
    for message, (code, _, errors, imported) in zip(refused.values(), others, strict=True):
        assert (code, imported) == (2, []) and message in errors
    assert sorted((path, path.stat().st_mtime_ns) for path in folder.rglob("*")) == before


def test_a_run_gives_a_sign_of_life_before_torch_and_says_what_python_lacks(tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.yaml", small_run(write_tokens(tmp_path / "tokens"), tmp_path / "run"))
    layout = ["--parallel.tensor_model_parallel_size", "2", "--parallel.data_parallel_size", "2"]
    [[code, output, errors, _]] = run(
        ["train", "--config", str(config), *layout], begin="import sys; sys.modules['torch'] = None"
    )
    assert output.splitlines()[0] == "starting 4 ranks on this machine (tp=2,dp=2)"
    assert code == 2 and "package torch is not installed" in errors
    assert not (tmp_path / "run").exists()
