"""The score of published runs: the committed constants on the committed runs, and fits to runs made from a formula."""

import csv
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.planning.machines import known_machines
from tests.small_runs import ROOT

PUBLISHED = ROOT / "tests" / "planning" / "published_runs.csv"
Score = Callable[..., dict[str, Any]]


@pytest.fixture
def score(run_tool: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Score:
    def run(*arguments: str) -> dict[str, Any]:
        assert run_tool("score_published", *arguments, "--json") == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_the_committed_constants_on_the_committed_runs(score: Score) -> None:
    report = score(str(PUBLISHED))
    assert len(report["runs"]) == 53
    for source in report["sources"].values():
        assert source["mean_error"] < 0.05 and abs(source["worst_error"]) < 0.10
        assert source["mean_error"] < source["mean_error_of_constant_utilization"]


@pytest.mark.full  # five fits
def test_each_source_predicted_without_its_own_runs(score: Score) -> None:
    report = score(str(PUBLISHED), "--leave-one-out")
    assert all(source["mean_error"] < 0.06 for source in report["sources"].values())
    assert report["all"]["mean_error"] < report["all"]["mean_error_of_constant_utilization"] / 2
    # Runs of SimuMax that wait for the host, of which no other source tells (docs/planning.md).
    beyond = [run for run in report["runs"] if abs(run["error"]) > 0.15]
    assert {run["name"].rpartition("_mbc")[0] for run in beyond} <= {"llama3_70b_l12_tp8_pp1_dp1"}
    for name in ("a100", "h100", "b200"):
        errors = [abs(run["error"]) for run in report["runs"] if run["gpu"] == name]
        assert sum(error <= known_machines()[name].relative_error for error in errors) >= 0.9 * len(errors)


def test_a_fit_finds_a_slower_chip(score: Score, tmp_path: Path) -> None:
    """Runs whose seconds are the formula's at three quarters of the H100's product rates, FP8's mostly."""
    from published.rows import read_rows

    with PUBLISHED.open(newline="") as stream:
        lines = [line for line in csv.DictReader(stream) if line["src"] == "nemo24.07" and line["pp"] == "1"]
    for line in lines:
        line["src"] = line["name"]  # of several sources, so that they weigh
    h100 = known_machines()["h100"]
    rates = ("product_efficiency", "fp8_product_efficiency")
    slower = dataclasses.replace(h100, **{name: 0.75 * getattr(h100, name) for name in rates})
    file = tmp_path / "made.csv"

    def write() -> None:
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, lines[0])
            writer.writeheader()
            writer.writerows(lines)

    write()
    for line, row in zip(lines, read_rows(file), strict=True):
        line["step_seconds"] = str(row.predict(slower))
    write()
    committed, fitted = score(str(file))["all"], score(str(file), "--fit-on", str(file))
    assert committed["mean_error"] > 0.10
    assert fitted["all"]["mean_error"] < committed["mean_error"] / 4
    assert fitted["constants"]["h100"]["fp8_product_efficiency"] < 0.85 * h100.fp8_product_efficiency


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace(",step_seconds,", ",seconds,", 1), "no column step_seconds"),
        (lambda text: text.replace(",A100,", ",A1000,", 1), ":2: gpu is 'A1000'; it must be one of A100"),
        (lambda text: text.replace(",bf16,8,8,", ",bf16,8,3,", 1), ":2: 8 gpus are no multiple of tp x pp x cp, 3"),
        (lambda text: text.replace(",full,1.42,", ",full,0,", 1), ":2: step_seconds is 0.0; it must be above 0"),
        (lambda text: text.replace(",6144,24576,64,", ",six,24576,64,", 1), ":2: invalid literal"),
        (lambda text: text.replace(",6144,24576,64,", ",6144,24576,63,", 1), ":2: model.hidden_size 6144 is not"),
    ],
)
def test_wrong_rows_are_refused_in_one_line(
    change: Callable[[str], str],
    said: str,
    run_tool: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(change(PUBLISHED.read_text()))
    assert run_tool("score_published", str(file)) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_file_that_is_not_there(run_tool: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool("score_published", "none.csv") == 2
    assert "none.csv cannot be read" in capsys.readouterr().err
