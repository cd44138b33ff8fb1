"""The benchmark of training on a model of a few thousand weights: whole, and sums that must hold."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fanformer.ops import cpu_kernels
from megatron_fanformer.plan.machines import load_machine
from tests.small_runs import ROOT, small_run, write_config


@pytest.fixture
def bench(run_tool: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Its `main` in this process; the ranks have their own."""
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")  # put back at the end
    yield partial(run_tool, "bench_train", "--device", "cpu")
    cpu_kernels.unload("the benchmark is over")


@pytest.mark.full  # it starts ranks of its own for each case
def test_a_line_a_case_and_sums_that_hold(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "run.yaml", small_run(str(tmp_path / "none"), tmp_path / "run"))
    file = tmp_path / "report.json"
    options = ["--config", str(config), "--dtype", "fp32", "--rounds", "1", "--steps", "1", "--json", str(file)]
    cases = ["--case", "alone", "p=0.125", "--case", "shared", "p=0.125", "layout=tp=2", "training.seed=1"]
    assert bench(*options, *cases, "--rates") == 0
    message = capsys.readouterr().out
    report = json.loads(file.read_text())
    lines = {line["case"]: line for line in report["cases"]}
    assert list(lines) == ["alone", "shared"] and all(name in message for name in lines)
    for line in lines.values():
        assert line["step_seconds"] > 0 and line["peak_memory_bytes"] > 0
        share = line["model_flops_per_second"] / report["rates"]["fastest"]
        assert line["share_of_fastest_product"] == pytest.approx(share)
    assert lines["alone"]["predicted_step_seconds"] > 0
    assert lines["shared"]["predicted_step_seconds"] is None  # ranks that share the cores
    assert load_machine(str(file)).fp32_flops_per_second == report["rates"]["mean"]


@pytest.mark.parametrize(("name", "peak"), [("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA L40S", None)])
def test_a_gpu_is_held_to_its_own_data_sheet(monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import bench_train

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    values = small_run("tokens", Path("run"), runtime={"device": "cuda"}, precision={"dtype": "bf16"})
    case = bench_train.Case("F", values, turns=[0.5])
    line: dict[str, Any] = bench_train._line(case, case, bench_train._device("cuda"))
    expected = peak and line["model_flops_per_second"] / peak
    assert line["share_of_peak"] == expected and (line["predicted_step_seconds"] is None) == (peak is None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--case", "F"], "--case F: it has no model; write fanformer"),
        (["--case", "F", "fanfromer"], "'fanfromer' is no model"),
        (["--json", "none/report.json"], "--json none/report.json is not a file in a folder that exists"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    bench: Callable[..., int], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*options) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line
