"""Whole processes on the stand-in, by the folder that installs it where they start (see tests/engine_on_cpu/site)."""

import os
from pathlib import Path

import pytest
import yaml

from tests.small_runs import ROOT, small_run, start_command, write_config, write_tokens

SITE = ROOT / "tests" / "engine_on_cpu" / "site"
STAND_IN = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SITE)]), "CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.full
def test_a_run_has_the_engines_layers(tmp_path: Path) -> None:
    run = tmp_path / "run"
    values = small_run(
        write_tokens(tmp_path / "tokens"),
        run,
        kernels={"transformer_impl": "transformer_engine"},
        runtime={"device": "auto", "distributed_backend": "gloo"},
        schedule={"lr_warmup_iters": 1},
        training={"train_iters": 2},
    )
    process = start_command("train", "--config", str(write_config(tmp_path / "run.yaml", values)), environment=STAND_IN)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    resolved = yaml.safe_load((run / "config.yaml").read_text())
    assert resolved["kernels"]["transformer_impl"] == "transformer_engine"
    assert resolved["runtime"]["device"] == "cuda"
