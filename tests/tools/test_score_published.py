"""The score of published runs: the committed constants on the committed runs, and fits to runs made from a formula."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.small_runs import ROOT

PUBLISHED = ROOT / "tests" / "plan" / "published_runs.csv"
Score = Callable[..., dict[str, Any]]


@pytest.fixture
def score(run_tool: Callable[..., int], tmp_path: Path) -> Score:
    def run(*arguments: str) -> dict[str, Any]:
        assert run_tool("score_published", *arguments, "--json", str(tmp_path / "scores.json")) == 0
        return json.loads((tmp_path / "scores.json").read_text())

    return run


def test_the_committed_constants_on_the_committed_runs(score: Score, capsys: pytest.CaptureFixture[str]) -> None:
    report = score(str(PUBLISHED))
    assert len(report["rows"]) == 165
    origins = (ROOT / "tests" / "README.md").read_text()
    assert [row["src"] for row in report["rows"] if f"`{row['src']}`" not in origins] == []
    assert {"src", "name", "gpu", "prec", "error"} <= report["rows"][0].keys()
    assert report["all"]["mean_error"] < 0.05 and abs(report["all"]["worst_error"]) < 0.25
    for name, source in report["sources"].items():
        assert source["mean_error"] < source["mean_error_of_constant_utilization"], name
    for kind, interval in report["intervals"].items():
        assert interval["within_stated"] >= 0.9, kind
    output = capsys.readouterr().out
    assert all(name in output for name in (*report["sources"], *report["intervals"]))


@pytest.mark.full  # eight fits
def test_each_source_predicted_without_its_own_runs(score: Score) -> None:
    report = score(str(PUBLISHED), "--leave-one-out")
    assert report["all"]["mean_error"] < 0.6 * report["all"]["mean_error_of_constant_utilization"]
    for kind, interval in report["intervals"].items():
        assert interval["within_stated"] >= 0.9, kind
        assert interval["width"] <= interval["stated"] < interval["width"] + 0.011, kind  # in whole percent
        assert interval["within_others"] is None or interval["within_others"] >= 0.85, kind  # nine of ten, by chance
