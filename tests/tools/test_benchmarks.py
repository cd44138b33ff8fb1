"""The benchmarks run on what is small, and their sums hold."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fanformer.ops import cpu_kernels
from megatron_fanformer.plan.machines import load_machine
from tests.prepare.making import as_line
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


def objects(*options: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(ROOT / "tools" / "bench_kernels.py"), *options, "--json"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@pytest.mark.full
def test_the_fan_activation() -> None:
    size = ["--device", "cpu", "--tokens", "16", "--repeats", "2", "--hidden-size", "64"]
    results = objects("fan", *size)
    ways = [(dtype, "eager", way) for dtype in ("fp32", "bf16") for way in ("forward", "backward")]
    assert [(result["dtype"], result["form"], result["direction"]) for result in results] == ways
    # 16 tokens: 48 rows read and 64 columns written; 32 columns of X_F and its 64 gradients read, 48 written.
    moved = [result["bytes_per_second"] * result["seconds"] for result in results[:2]]
    assert moved == pytest.approx([16 * 112 * 4, 16 * 144 * 4])


@pytest.mark.full
def test_the_loss_head() -> None:
    size = ["--device", "cpu", "--tokens", "64", "--repeats", "1", "--hidden-size", "16", "--vocab-size", "1024"]
    plain, chunked = objects("loss-head", *size, "--dtypes", "fp32")
    assert (plain["case"], chunked["case"]) == ("plain", "chunked")
    assert plain["time_ratio"] == plain["memory_ratio"] == 1 and chunked["seconds"] > 0


@pytest.mark.full
def test_prepare_beside_a_plain_loop(tmp_path: Path, olmo_tokenizer_file: Path) -> None:
    corpus, work = tmp_path / "a.jsonl", tmp_path / "work"
    corpus.write_bytes(b"".join(as_line(f"document {number}") + b"\n" for number in range(5)))
    command = [sys.executable, str(ROOT / "tools" / "bench_prepare.py"), "--corpus", str(corpus), "--work", str(work)]
    options = ["--tokenizer", str(olmo_tokenizer_file), "--workers", "1", "--turns", "1"]
    printed = subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout.splitlines()
    *_, ours, loop, last = printed
    assert ours.startswith("prepare, gigatoken") and loop.startswith("encode_files")
    assert last == "the same tokens" and list(work.iterdir()) == []
