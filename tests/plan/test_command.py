"""The verb `plan`: what it prints and writes, and its exit codes."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_fanformer.cli import main
from megatron_fanformer.plan.communication import communication
from megatron_fanformer.plan.memory import rank_memory
from tests.small_runs import ROOT, small_run, write_config

MXFP8 = ["--precision.fp8", "hybrid", "--precision.fp8_recipe", "mxfp8", "--kernels.transformer_impl", "auto"]
KEYS = {"model", "machine", "layout", "memory", "time", "cost", "communication", "candidates", "rejected"}


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


def test_the_stages_of_the_data_are_listed(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 20 steps of 256 tokens, in the order in which they begin, with the rates of their first and last steps."""
    report = tmp_path / "plan.json"
    stages = "{from token 3.072K: [b], from step 6: [c]}"  # 12 steps
    wsd = ["--schedule.lr_decay_style", "WSD", "--schedule.lr_wsd_decay_iters", "15", "--schedule.min_lr", "0"]
    wsd += ["--schedule.lr_wsd_decay_style", "linear", "--optimizer.lr", "0.003", "--schedule.lr_warmup_iters", "3"]
    assert plan(config, "--layouts", "pp=4", "--report", str(report), "--data.stages", stages, *wsd) == 0
    found = json.loads(report.read_text())
    rates = {"train_data": [1e-3, 3e-3], "from step 6": [2.8e-3, 1.6e-3], "from token 3.072K": [1.4e-3, 0]}
    assert found["stage_learning_rates"] == {name: pytest.approx(own) for name, own in rates.items()}
    assert list(found["stages"].items()) == [("from step 6", 6), ("from token 3.072K", 13)]
    _, _, table = capsys.readouterr().out.partition("stages of the data")
    rows = [re.split(r"  +", line) for line in table.splitlines()[1:5]]
    assert [row[:-2] + row[-1:] for row in rows[1:]] == [
        ["train_data", "1", "5", "1,280", "0.001 to 0.003"],
        ["from step 6", "6", "7", "1,792", "0.0028 to 0.0016"],
        ["from token 3.072K", "13", "8", "2,048", "0.0014 to 0"],
    ]
    assert sum(float(row[-2]) for row in rows[1:]) <= found["cost"]["days"] + 0.015
    short = ["--tokens", "1024", "--report", str(report)]  # 4 steps, before any stage begins
    assert plan(config, "--layouts", "pp=4", *short, "--data.stages", stages, *wsd) == 0
    assert [*json.loads(report.read_text())["stage_learning_rates"]] == ["train_data"]


def test_the_report_holds_all_of_it(config: str, tmp_path: Path) -> None:
    report = tmp_path / "plan.json"
    arguments = ["--layouts", "tp=2,pp=2", "pp=4", "tp=3", "--tokens", "3M", "--price", "2.5", "--report", str(report)]
    assert plan(config, *arguments) == 0
    found = json.loads(report.read_text())
    assert {*KEYS, "simulated", "assumptions"} <= set(found)
    assert {each["layout"] for each in found["candidates"]} == {"tp=2,pp=2", "pp=4"}
    (illegal,) = {each["example"] for each in found["rejected"]}
    assert illegal == "tp=3"
    seconds = found["time"]["seconds"]
    assert seconds == min(each["seconds"] for each in found["candidates"])
    assert sum(found["time"]["parts"].values()) == pytest.approx(seconds, rel=1e-9)
    memory = found["memory"]
    fullest = max(stage["total"] for stage in memory["stages"])
    assert memory["reserve"] == 6 * 2**30 + round(0.022 * fullest) and memory["needed"] == fullest + memory["reserve"]
    assert memory["usable"] == int(0.99 * memory["of_a_gpu"])
    for stage in found["memory"]["stages"]:
        assert sum(stage["lines"].values()) == stage["total"] <= found["memory"]["needed"] - found["memory"]["reserve"]
    hours = 3e6 / (16 * 16 / seconds) / 3600  # 16 samples of 16 tokens a step
    assert found["cost"]["days"] == pytest.approx(hours / 24)
    assert found["cost"]["gpu_hours"] == pytest.approx(8 * hours)
    assert found["cost"]["price"] == pytest.approx(2.5 * 8 * hours)
    assert not (tmp_path / "run").exists()


def test_saves_and_failures_are_part_of_the_run(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "plan.json"
    arguments = ["--tokens", "3M", "--price", "2.5", "--report", str(report), "--checkpoint.save_interval", "1000"]
    assert plan(config, *arguments) == 0
    found = json.loads(report.read_text())
    assert found["goodput"] is None and found["checkpoints"]["saves"] == 12  # 11,719 steps of 256 tokens
    assert "give --save-rate" in capsys.readouterr().out
    assert plan(config, *arguments, "--save-rate", "2", "--failure-hours", "0.1", "--restart-minutes", "1") == 0
    found = json.loads(report.read_text())
    spent = found["goodput"]
    assert 0 < spent["share"] < 1
    assert spent["save_seconds"] == found["checkpoints"]["checkpoint_bytes"] / 2e9
    output = capsys.readouterr().out
    days = f"{found['cost']['days'] / spent['share']:,.2f}"
    assert f"{spent['share']:.1%} of the time" in output and f"{days} days in all" in " ".join(output.split())


def test_the_layout_is_written_as_lines_to_paste(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They make the configuration that was judged; an existing file is left alone, and nothing is judged."""
    file = tmp_path / "layout.yaml"
    own = ["--parallel.ddp_bucket_size", "5000", "--parallel.overlap_grad_reduce", "true"]
    layout = "tp=2,pp=2,sp=true,fan=sequence,recompute=selective,recompute_modules=[fan,mlp],loss_head_chunk_tokens=8"
    report = tmp_path / "plan.json"
    assert plan(config, "--layouts", f"{layout},mbs=2", "--write", str(file), "--report", str(report), *own) == 0
    written = yaml.safe_load(file.read_text())
    assert written["training"] == {"micro_batch_size": 2} and written["kernels"] == {"loss_head_chunk_tokens": 8}
    pasted = tmp_path / "pasted.yaml"
    values = yaml.safe_load(Path(config).read_text())
    pasted.write_text(
        yaml.safe_dump({name: {**values.get(name, {}), **written.get(name, {})} for name in {*values, *written}})
    )
    before = json.loads(report.read_text())
    output = capsys.readouterr().out
    assert "\n".join(file.read_text().splitlines()[2:]) in output
    assert plan(str(pasted), "--report", str(report)) == 0
    after = json.loads(report.read_text())
    assert after["layout"]["parallel"] == before["layout"]["parallel"]
    assert after["time"] == before["time"] and after["memory"] == before["memory"]
    capsys.readouterr()
    assert plan(config, "--layouts", "pp=4", "--write", str(file)) == 2
    output = capsys.readouterr()
    assert "layout.yaml already exists; name another file" in output.err and not output.out
    assert yaml.safe_load(file.read_text()) == written
    assert plan(config, "--layouts", "pp=3", "--write", str(tmp_path / "none.yaml")) == 2
    assert not (tmp_path / "none.yaml").exists()


def test_the_table_names_every_part(config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = tmp_path / "plan.json"
    assert plan(config, "--report", str(report), "--parallel.tensor_model_parallel_size", "2") == 0
    table = capsys.readouterr().out
    found = json.loads(report.read_text())
    assert "tp=2" in table and "fits" in table and "Predicted, not measured" in table
    for name in [
        *(name for name, value in found["time"]["parts"].items() if value),
        *found["memory"]["stages"][0]["lines"],
        *found["assumptions"],
    ]:
        assert name in table


@pytest.mark.parametrize(
    ("arguments", "gpus", "gpu", "message"),
    [
        ([], 8, "h10", "did you mean h100?"),
        (["--parallel.tensor_model_parallel_size", "4"], 2, "h100", "not a multiple of tensor x context x pipeline"),
        (["--layouts", "pp=3"], 6, "h100", "layout 'pp=3': parallel.pipeline_model_parallel_size 3 does not divide"),
        (["--layouts", "mbs=0"], 8, "h100", "training.micro_batch_size is 0; it must be at least 1"),
        (["--layouts", "tp"], 8, "h100", "write it as in tp=2,sp=true"),
        (["--layouts", "tp=two"], 8, "h100", "tensor_model_parallel_size"),
        (["--layouts", "tq=2"], 8, "h100", "unknown configuration key tq"),
        (["--tokens", "1.5"], 8, "h100", "'1.5' is not a number from 1 to 1000000T; write it as in 1.05T, 300B"),
        (["--price", "nan"], 8, "h100", "must be a number above 0"),
        (["--save-rate", "0"], 8, "h100", "'0' must be a number above 0"),
        (["--write", "none/layout.yaml"], 8, "h100", "--write none/layout.yaml is not a file in a folder that exists"),
        (["--simulate", "8"], 8, "h100", "has the ranks 0 to 7"),
        (["--report", "none/plan.json"], 8, "h100", "--report none/plan.json is not a file in a folder that exists"),
        (["--model.hidden_size", "33"], 8, "h100", "model.hidden_size 33 is not a multiple"),
        (["--precision.fp8", "hybrid", "--kernels.transformer_impl", "auto"], 8, "a100", "change precision.fp8"),
        (
            [*MXFP8, "--layouts", "tp=1"],
            8,
            "h100",
            "whose blocks of 32 NVIDIA H100 SXM, 80 GB does not scale in hardware",
        ),
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


@pytest.mark.parametrize(("dropped", "heavier", "message"), [(0, 1.0, ""), (1, 1.0, "counted"), (0, 1.1, "memory")])
def test_a_simulation_that_disagrees_is_told_and_ends_with_code_4(
    config: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dropped: int,
    heavier: float,
    message: str,
) -> None:
    from megatron_fanformer.plan import simulation
    from megatron_fanformer.plan.estimate import job_of

    def run_rank(run: Any, *, world_size: int, rank: int) -> Any:
        job = dataclasses.replace(job_of(run, world_size), on_cpu=True)
        lines: list[Any] = communication(job, 0)[dropped:]
        peak = round(rank_memory(job, 0).total_bytes * heavier)
        return simulation.SimulatedRank(rank=rank, stage=0, job=job, peak_bytes=peak, held_bytes=0, collectives=lines)

    monkeypatch.setattr(simulation, "run_rank", run_rank)
    assert plan(config, "--simulate", "0", "--parallel.tensor_model_parallel_size", "2") == (4 if message else 0)
    output = capsys.readouterr()
    assert ("DISAGREES" in output.out) == bool(message)
    assert all("simulation and formula disagree" in line and message in line for line in output.err.splitlines())
    assert bool(output.err) == bool(message)


def test_simulated_stages_agree_with_the_formulas(config: str, tmp_path: Path) -> None:
    report = tmp_path / "plan.json"
    arguments = ["--layouts", "tp=2,pp=2,sp=true,fan=sequence", "--simulate", "all-stages", "--report", str(report)]
    assert plan(config, *arguments, "--training.global_batch_size", "64", gpus=32) == 0
    found = json.loads(report.read_text())["simulated"]
    assert [each["rank"] for each in found] == [0, 16]
    assert not any(each["differences"] for each in found)


def test_torch_is_not_imported(config: str) -> None:
    program = "import sys; from megatron_fanformer.cli import main; code = main(sys.argv[1:]); " + (
        "sys.exit(code or any(name in sys.modules for name in ('torch', 'megatron.core', 'transformers')))"
    )
    arguments = ["plan", "--config", config, "--gpus", "8", "--gpu", "h100", "--search"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
