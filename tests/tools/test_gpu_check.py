"""The check of a machine with a GPU, rehearsed: all of it on the stand-in of tests/engine_on_cpu, on small sizes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine_on_cpu import extension
from tests.small_runs import ROOT

SCRIPT = ROOT / "tools" / "gpu_check.sh"
SITE_FOLDERS = os.pathsep.join([str(extension.ENGINE), str(ROOT / "tests" / "engine_on_cpu" / "site")])
PARTS = ("machine", "bench_fan", "bench_loss_head", "bench_train")
# Why a test may be skipped where the GPU is the stand-in of a Hopper.
REASONS = ("the GPU is the stand-in", "it needs 10.x", "megatron.training comes with")


def check(*arguments: str, path: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
    # Test processes hide GPUs, this one too.
    settings = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "0", "PATH": f"{path}:{os.environ['PATH']}"}
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(
        command, env={**os.environ, **settings, **environment}, capture_output=True, text=True, check=False
    )


def test_arguments_that_are_wrong(tmp_path: Path) -> None:
    assert "SITE_FOLDER [REPORT_FOLDER]" in check().stderr
    (tmp_path / "there").mkdir()
    there, none = str(tmp_path / "there"), str(tmp_path / "none")
    for arguments, said in (([there, there], "there exists; name another"), ([none, none], "none is no folder")):
        done = check(*arguments)
        assert done.returncode == 2
        assert said in done.stderr


@pytest.mark.full
def test_what_the_site_folder_lacks_is_named(tmp_path: Path) -> None:
    done = check(str(tmp_path), str(tmp_path / "report"))
    assert done.returncode == 1
    assert "add to the site folder: transformer_engine.pytorch" in done.stderr


@pytest.mark.full
@pytest.mark.timeout(3600)  # a dozen minutes on two idle cores
def test_the_whole_check_on_the_stand_in(tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho none\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    report = tmp_path / "report"
    done = check(SITE_FOLDERS, str(report), path=str(tmp_path), REHEARSAL="1")
    log = (report / "tests.log").read_text() if (report / "tests.log").is_file() else done.stderr
    assert done.returncode == 0, f"{done.stdout}\n{log[-20_000:]}"
    files = [file.stem for file in (ROOT / "tests" / "gpu").glob("test_*.py")]
    ended = dict(re.findall(r"^(\w+) +\d+ s  (\w+)$", (report / "summary.txt").read_text(), re.MULTILINE))
    assert ended == dict.fromkeys([*PARTS, *files], "ok")
    assert "stand-in (9, 0) FP8" in (report / "machine.txt").read_text()
    skipped = re.findall(r"^SKIPPED \[\d+\] (.*)$", log, re.MULTILINE)
    assert [line for line in skipped if not any(reason in line for reason in REASONS)] == []
    for name in ("bench_fan", "bench_loss_head"):
        assert [json.loads(line) for line in (report / f"{name}.json").read_text().splitlines()]
    cases = {line["case"] for line in json.loads((report / "bench_train.json").read_text())["cases"]}
    assert cases == {
        f"{model} {dtype}" for model in ("fanformer", "transformer", "same-params") for dtype in ("bf16", "fp8")
    }
