"""The verb `plan`: what it prints and writes, and its exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_fanformer.cli import main
from tests.small_runs import ROOT, small_run, write_config

MXFP8 = ["--precision.fp8", "hybrid", "--precision.fp8_recipe", "mxfp8", "--kernels.transformer_impl", "auto"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A configuration whose token files do not exist."""
    values = small_run(
        "no-tokens",
        tmp_path / "run",
        model={"num_layers": 4},
        precision={"dtype": "bf16"},
        training={"global_batch_size": 16, "micro_batch_size": 1},
    )
    return str(write_config(tmp_path / "config.yaml", values))


def plan(config: str, *arguments: str, gpus: int = 8, gpu: str = "h100") -> int:
    return main(["plan", "--config", config, "--gpus", str(gpus), "--gpu", gpu, *arguments])


def test_the_report_holds_all_of_it(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "plan.json"
    arguments = ["--layouts", "tp=2,pp=2", "pp=4", "tp=3", "--tokens", "3M", "--price", "2.5", "--report", str(report)]
    assert plan(config, *arguments) == 0
    found = json.loads(report.read_text())
    assert {each["layout"] for each in found["candidates"]} == {"tp=2,pp=2", "pp=4"}
    assert {each["example"] for each in found["rejected"]} == {"tp=3"}
    assert {line["stage"] for line in found["communication"]} >= {0, 1}
    best, other = found["candidates"]
    assert best["seconds"] < other["seconds"]
    assert sum(best["parts"].values()) == pytest.approx(best["seconds"], rel=1e-9)
    fullest = max(sum(stage["lines"].values()) for stage in best["stages"])
    assert best["memory"] == fullest + 6 * 2**30 + round(0.022 * fullest)
    hours = 3e6 / (16 * 16 / best["seconds"]) / 3600  # 16 samples of 16 tokens a step
    assert found["cost"]["days"] == pytest.approx(hours / 24)
    assert found["cost"]["gpu_hours"] == pytest.approx(8 * hours)
    assert found["cost"]["price"] == pytest.approx(2.5 * 8 * hours)
    assert not (tmp_path / "run").exists()
    table = capsys.readouterr().out
    assert "fits" in table and "Predicted, not measured" in table
    assert all(name in table for name in [*best["parts"], *best["stages"][0]["lines"]])


def test_the_layouts_lines_make_the_configuration_that_was_judged(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["--parallel.ddp_bucket_size", "5000", "--parallel.overlap_grad_reduce", "true"]
    layout = "tp=2,pp=2,sp=true,fan=sequence,recompute=selective,recompute_modules=[fan,mlp],loss_head_chunk_tokens=8"
    report = tmp_path / "plan.json"
    assert plan(config, "--layouts", f"{layout},mbs=2", "--report", str(report), *own) == 0
    before = json.loads(report.read_text())["candidates"]
    _, _, rest = capsys.readouterr().out.partition("the layout, as lines of a configuration")
    written = yaml.safe_load(rest.partition("\n")[2].split("\n\n")[0])
    assert written["training"] == {"micro_batch_size": 2} and written["kernels"] == {"loss_head_chunk_tokens": 8}
    values = yaml.safe_load(Path(config).read_text())
    merged = {name: {**values.get(name, {}), **written.get(name, {})} for name in {*values, *written}}
    Path(config).write_text(yaml.safe_dump({**merged, "parallel": written["parallel"]}))
    assert plan(config, "--report", str(report)) == 0
    (after,) = json.loads(report.read_text())["candidates"]
    assert [{**after, "layout": before[0]["layout"]}] == before


@pytest.mark.parametrize(
    ("arguments", "gpus", "gpu", "message"),
    [
        ([], 8, "h10", "did you mean h100?"),
        (["--parallel.tensor_model_parallel_size", "4"], 2, "h100", "not a multiple of tensor x context x pipeline"),
        (["--layouts", "pp=3"], 6, "h100", "layout 'pp=3': parallel.pipeline_model_parallel_size 3 does not divide"),
        (["--layouts", "mbs=0"], 8, "h100", "training.micro_batch_size is 0; it must be at least 1"),
        (["--layouts", "tp=two"], 8, "h100", "tensor_model_parallel_size"),
        (["--tokens", "1.5"], 8, "h100", "'1.5' is not a number from 1 to 1000000T; write it as in 1.05T, 300B"),
        (["--price", "nan"], 8, "h100", "must be a number above 0"),
        (["--simulate", "0"], 8, "h100", "tests/plan compares the formulas"),
        (["--report", "none/plan.json"], 8, "h100", "--report none/plan.json is not a file in a folder that exists"),
        (["--model.hidden_size", "33"], 8, "h100", "model.hidden_size 33 is not a multiple"),
        (["--precision.fp8", "hybrid", "--kernels.transformer_impl", "auto"], 8, "a100", "change precision.fp8"),
        ([*MXFP8, "--layouts", "tp=1"], 8, "h100", "whose blocks of 32 NVIDIA H100 SXM, 80 GB does not scale"),
        (["--search", "--training.global_batch_size", "1"], 7, "h100", "none of"),
    ],
)
def test_a_wrong_request_is_one_line(
    config: str, capsys: pytest.CaptureFixture[str], arguments: list[str], gpus: int, gpu: str, message: str
) -> None:
    assert plan(config, *arguments, gpus=gpus, gpu=gpu) == 2
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert message in line
    assert output.out == ""


@pytest.mark.parametrize("asked", [[], ["--search"]])
def test_what_does_not_fit_is_shown_and_refused(
    config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, asked: list[str]
) -> None:
    machine = tmp_path / "small.yaml"
    machine.write_text("like: h100\nname: a small one\nmemory_bytes: 1000\n")
    assert plan(config, *asked, gpu=str(machine)) == 2
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert "but a small one has 0.0" in line
    assert "does NOT fit" in output.out


def test_torch_is_not_imported(config: str) -> None:
    program = "import sys; from megatron_fanformer.cli import main; code = main(sys.argv[1:]); " + (
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'megatron.core', 'transformers')))"
    )
    arguments = ["plan", "--config", config, "--gpus", "8", "--gpu", "h100", "--search"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
