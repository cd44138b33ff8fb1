"""The benchmark of steps: what it says of a GPU that it knows, and of one that it does not."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.small_runs import ROOT, small_run

TURN = {"seconds": 0.5, "between_steps": 0.01, "peak_memory_bytes": 10**9}


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import bench_steps

    yield bench_steps


def report_of(tool: Any, case: str) -> dict[str, Any]:
    """What it writes of one case, of which a turn was measured on torch's current GPU."""
    machine = tool._machine("cuda")
    values = small_run("tokens", Path("run"), runtime={"device": "cuda"}, precision={"dtype": "bf16"})
    return {"machine": machine, "cases": [tool._line(tool.Case(case, values, {}, [TURN]), machine)]}


def test_a_known_gpu_is_held_to_its_own_data_sheet(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    [line] = report_of(tool, "F")["cases"]
    assert line["share_of_peak"] == pytest.approx(line["model_flops_per_second"] / 312e12)
    assert line["predicted_step_seconds"] > 0
    assert f"{line['share_of_peak']:.2%}" in tool._shown(line)


@pytest.mark.parametrize(
    ("name", "is_judged"),
    [("NVIDIA A100-SXM4-80GB", True), ("NVIDIA H100 PCIe", False), ("NVIDIA L40S", False)],
)
def test_a_gpu_that_is_not_known_is_held_to_no_others_data_sheet(
    tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, is_judged: bool
) -> None:
    from queueing.parts import PARTS
    from queueing.record import Setting

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    report = report_of(tool, "F, graphs") | {"rates": {"mean": 6e14}}
    report["cases"] += report_of(tool, "F")["cases"]
    (tmp_path / "step.json").write_text(json.dumps(report))
    goals = [goal for part in PARTS if part.name in ("step", "layers-7b") for goal in part.goals]
    by_data_sheet = [goal for goal in goals if re.search("data sheet|by formula", goal.name)]
    figures = [goal.figure(Setting(folder=tmp_path)) for goal in by_data_sheet]
    assert [figure.met is not None for figure in figures] == [is_judged] * 3
    assert ("TFLOP/s       - " in tool._shown(report["cases"][0])) is not is_judged


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--case", "F"], "--case F: it has no model; write fanformer or transformer after its name"),
        (["--case", "F", "fanfromer"], "--case F: 'fanfromer' is no model"),
        (["--case", "F", "fanformer", "training.seed=one"], "'one' is not JSON"),
        (["--case", "F", "fanformer", "--json", "none/step.json"], "--json none/step.json is not a file in a folder"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line_before_anything_runs(
    run_tool: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")  # put back at the end
    assert run_tool("bench_steps", "--device", "cpu", "--json", str(tmp_path / "step.json"), *options) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert named in line


@pytest.mark.parametrize("option", ["--rounds", "--steps", "--warm-up", "--ahead"])
def test_nothing_is_measured_in_no_steps(
    run_tool: Callable[..., int], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        run_tool("bench_steps", "--case", "F", "fanformer", "--json", "none/step.json", option, "0")
    assert refused.value.code == 2
    assert "'0' must be an integer of at least 1" in capsys.readouterr().err
