"""The benchmark of training on a model of a few thousand weights: whole, and sums that must hold."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from megatron_fanformer.ops import cpu_kernels
from megatron_fanformer.planning.machines import load_machine
from tests.small_runs import small_run, write_config

NUMBERS = {
    "tokens_per_second",
    "model_flops_per_second",
    "matrix_flops_per_second",
    "share_of_matrix_rate",
    "peak_memory_bytes",
    "step_seconds",
}


@pytest.fixture
def bench(run_tool: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Its `main` in this process; the ranks have their own."""
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "1")  # put back at the end
    yield partial(run_tool, "bench_train")
    cpu_kernels.unload("the benchmark is over")


@pytest.mark.full  # it starts ranks of its own for each case
def test_a_line_a_case_and_sums_that_hold(
    bench: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "run.yaml", small_run(str(tmp_path / "none"), tmp_path / "run"))
    report = tmp_path / "report.json"
    options = ["--models", "p=0.125", "--layouts", "tp=1", "tp=2", "--dtypes", "fp32"]
    assert bench("--config", str(config), *options, "--rounds", "1", "--steps", "1", "--json", str(report)) == 0
    message = capsys.readouterr().out
    lines = {line["case"]: line for line in json.loads(report.read_text())["cases"]}
    assert list(lines) == ["p=0.125 fp32", "p=0.125 fp32 tp=2"]
    for line in lines.values():
        assert all(line[name] > 0 for name in NUMBERS)
        share = line["model_flops_per_second"] / line["matrix_flops_per_second"]
        assert line["share_of_matrix_rate"] == pytest.approx(share)
    assert all(name in message for name in lines)
    alone, shared = lines.values()
    assert alone["predicted_step_seconds"] > 0 and "predicted_step_seconds" not in shared  # ranks that share the cores
    machine = load_machine(str(report))
    assert machine.fp32_flops_per_second <= 1.01 * alone["matrix_flops_per_second"]  # the mean product, the fastest


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--models", "transfomer"], "'transfomer'"),
        (["--models", "p=0.9"], "0.9"),
        (["--layouts", "tp=two"], "tp=two"),
        (["--set", "training.seed", "one"], "--set training.seed: 'one' is not JSON"),
        (["--set", "seed", "1"], "--set seed: name a field with its section"),
        (["--json", "none/report.json"], "--json none/report.json is not a file in a folder that exists"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line_before_anything_runs(
    bench: Callable[..., int], options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*options) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert named in line


@pytest.mark.parametrize("option", ["--rounds", "--steps"])
def test_nothing_is_measured_in_no_steps(
    bench: Callable[..., int], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        bench(option, "0")
    assert refused.value.code == 2
    assert "'0' must be an integer of at least 1" in capsys.readouterr().err
