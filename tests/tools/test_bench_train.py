"""The benchmark of training on a model of a few thousand weights: whole, and sums that must hold."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_runs import ROOT, small_run, write_config

TOOL = ROOT / "tools" / "bench_train.py"
NUMBERS = {
    "tokens_per_second",
    "model_flops_per_second",
    "matrix_flops_per_second",
    "share_of_matrix_rate",
    "peak_memory_bytes",
    "step_seconds",
}


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_a_line_a_case_and_sums_that_hold(tmp_path: Path) -> None:
    config = write_config(tmp_path / "run.yaml", small_run(str(tmp_path / "none"), tmp_path / "run"))
    report = tmp_path / "report.json"
    options = ["--models", "p=0.125", "--layouts", "tp=1", "tp=2", "--dtypes", "fp32"]
    done = bench("--config", str(config), *options, "--rounds", "1", "--steps", "1", "--json", str(report))
    assert done.returncode == 0, done.stderr
    lines = {line["case"]: line for line in json.loads(report.read_text())}
    assert list(lines) == ["p=0.125 fp32", "p=0.125 fp32 tp=2"]
    for line in lines.values():
        assert all(line[name] > 0 for name in NUMBERS)
        share = line["model_flops_per_second"] / line["matrix_flops_per_second"]
        assert line["share_of_matrix_rate"] == pytest.approx(share)
        assert {"matrix products", "attention", "FAN activation", "optimizer", "host"} <= set(line["breakdown_seconds"])
    assert "communication" in lines["p=0.125 fp32 tp=2"]["breakdown_seconds"]
    assert all(name in done.stdout for name in lines)


def test_unknown_models_and_layouts_are_refused_in_one_line(tmp_path: Path) -> None:
    wrong = (
        (["--models", "transfomer"], "'transfomer'"),
        (["--models", "p=0.9"], "0.9"),
        (["--layouts", "tp=two"], "tp=two"),
    )
    for options, named in wrong:
        done = bench(*options)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert named in done.stderr
