"""The page of experiments, and two runs compared step by step."""

import json
from pathlib import Path
from typing import Any

import markdown
import pytest

from megatron_fanformer import cli
from megatron_fanformer.errors import CorruptError, InputError
from megatron_fanformer.experiments.report import compare_runs, read_dynamics
from megatron_fanformer.experiments.result import (
    RESULT,
    Finding,
    Measured,
    Result,
    Table,
    as_markdown,
    read_result,
    write_folder,
)
from tests.small_runs import small_run, write_config

FINDING = Finding(
    name="error, FAN | MLP",
    paper="<b>less</b>",
    ours=0.45,
    interval=(0.31, None),
    unit="ratio",
    shows=None,
    sentence="FAN's error is *0.45* of the MLP's; it cannot be told.",
)


def result_in(folder: Path) -> Result:
    table = Table(title="Errors", columns=["network", "error"], rows=[["FAN", 1.25], ["MLP", None]])
    measured = Measured(findings=[FINDING], tables=[table], pictures={"fit.png": b"PNG"}, seconds=81.2)
    return write_folder(folder, "mod", {"seeds": 3}, measured)


def test_a_result_is_read_as_it_was_written_and_nothing_less(tmp_path: Path) -> None:
    result = result_in(tmp_path / "mod")
    assert read_result(tmp_path / "mod") == result
    file = tmp_path / "mod" / RESULT
    whole = file.read_bytes()
    for damaged in (whole[:-20], whole.replace(b"0.45,", b'"much",')):
        file.write_bytes(damaged)
        with pytest.raises(CorruptError):
            read_result(tmp_path / "mod")


def test_a_page_has_every_finding_its_picture_and_what_must_not_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result_in(tmp_path / "runs" / "probes" / "mod")
    page = tmp_path / "page.md"
    assert cli.main(["report", str(tmp_path / "runs"), "--output", str(page)]) == 0
    assert FINDING.sentence in capsys.readouterr().out
    text = page.read_text()
    row = r"| error, FAN \| MLP | \<b\>less\</b\> | 0.45 ratio | 0.31 to ∞ | inconclusive |"
    assert all(part in text for part in (row, "](runs/probes/mod/fit.png)", "0.89 points", "Settings: seeds 3."))
    assert cli.main(["report", str(tmp_path / "nothing")]) == 2
    assert "has no result.json" in capsys.readouterr().err


def test_no_text_of_a_result_becomes_markup(tmp_path: Path) -> None:
    """A result's file may be another's: each of its texts, and the folder's name, is one that a browser would run."""
    evil = "<script>alert(1)</script>\n\n<img src=x onerror=alert(2)>"
    finding = Finding(name=evil, paper=evil, ours=1.0, unit=evil, shows=None, sentence=evil)
    result = Result(
        experiment=evil,
        settings={evil: evil, "list": [evil]},
        machine={"cores": evil, "processor": evil, "gpu": evil},
        seconds=1.0,
        findings=[finding],
        tables=[Table(title=evil, columns=[evil], rows=[[evil]])],
    )
    page = as_markdown([(tmp_path / "<script>", result)], at=tmp_path)
    rendered = markdown.markdown(page, extensions=["tables"])
    assert "<table>" in rendered and "<script" not in rendered and "<img" not in rendered


def write_run(
    folder: Path,
    *,
    placement: str,
    seed: int,
    losses: list[float],
    tokens: int = 64,
    sections: dict[str, dict[str, Any]] | None = None,
    **fan: str | float,
) -> Path:
    folder.mkdir()
    training = {"seed": seed}
    values = small_run("tokens", folder, model={"fan": {"placement": placement, **fan}}, training=training)
    for section, fields in (sections or {}).items():
        values[section] = {**values.get(section, {}), **fields}
    write_config(folder / "config.yaml", values)
    lines = [json.dumps({"step": n, "loss": loss, "tokens": tokens * n}) for n, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_a_planted_crossing_is_found_where_it_is_and_runs_are_paired_by_seed(tmp_path: Path) -> None:
    """B is above A by a straight line that passes 0 at step 121; noise is common to both runs of a seed."""
    runs = []
    for seed in (3, 1, 2):
        noise = [0.5 * ((seed * 7919 * n) % 101) / 101 for n in range(200)]
        runs.append(write_run(tmp_path / f"a{seed}", placement="none", seed=seed, losses=noise))
        offset = [0.001 * (120.5 - n) + 1e-4 * seed for n in range(1, 201)]
        both = [x + y for x, y in zip(noise, offset, strict=True)]
        runs.append(write_run(tmp_path / f"b{seed}", placement="qkv", seed=seed, losses=both))
    assert read_dynamics(runs).seeds == [1, 2, 3]
    result = compare_runs(runs, tmp_path / "out")
    assert [finding.shows for finding in result.findings] == [True, True]
    means = [finding.ours for finding in result.findings]
    assert means == pytest.approx([0.001 * (120.5 - step) + 2e-4 for step in (20.5, 180.5)])
    assert read_result(tmp_path / "out") == result
    of_one_seed = compare_runs(runs[:2], tmp_path / "one")
    assert [finding.shows for finding in of_one_seed.findings] == [None, None]
    turned = compare_runs([*runs[1::2], *runs[::2]], tmp_path / "turned")
    assert {(finding.shows, finding.exploratory, finding.paper) for finding in turned.findings} == {(None, True, None)}
    assert all(finding.sentence.endswith("a Transformer, named first, and a FANformer.") for finding in turned.findings)


@pytest.mark.parametrize(
    ("fan", "is_paper_pair"),
    [
        ({"placement": "qkv", "p_ratio": 0.125, "activation": "none"}, True),
        ({"placement": "qkv", "p_ratio": 0.0}, False),  # its ATL
        ({"placement": "qkv", "activation": "gelu"}, False),  # original FAN
        ({"placement": "ffn", "activation": "gelu"}, False),
        ({"placement": "qk_and_v"}, False),
    ],
)
def test_the_papers_claim_is_of_its_fanformer_alone(tmp_path: Path, fan: dict[str, Any], is_paper_pair: bool) -> None:
    a = write_run(tmp_path / "a", placement="none", seed=1, losses=[1.0])
    b = write_run(tmp_path / "b", seed=1, losses=[1.0], **fan)
    one, other = read_dynamics([a, b]), read_dynamics([b, a])
    assert (one.is_paper_pair, other.is_paper_pair) == (is_paper_pair, False)


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", placement="none", seed=1, losses=[1.0])
    same = write_run(tmp_path / "same", placement="none", seed=1, losses=[1.0])
    other = write_run(tmp_path / "other", placement="qkv", seed=2, losses=[1.0])
    larger = write_run(tmp_path / "larger", placement="qkv", seed=1, losses=[1.0], tokens=128)
    for runs, reason in (
        ([a, same], "the 2 runs are of 1 configuration"),
        ([a, other], "no seed in common"),
        ([a, larger], "tokens in these runs"),
        ([a, tmp_path], "is no run's folder"),
    ):
        with pytest.raises(InputError, match=reason):
            read_dynamics(runs)


def test_seeds_are_of_one_side_where_what_differs_decides_nothing(tmp_path: Path) -> None:
    other = {
        "data": {"num_workers": 2},
        "evaluation": {"perplexity": {"sets": {"own": ["a"]}}},
        "parallel": {"data_parallel_size": 2, "overlap_grad_reduce": True},
        "recovery": {"max_rewinds": 1},
        "training": {"exit_interval": 4, "micro_batch_size": 1, "seed": 2},
    }
    runs = [
        write_run(tmp_path / f"{placement}{seed}", placement=placement, seed=seed, losses=[1.0], sections=sections)
        for placement in ("none", "qkv")
        for seed, sections in ((1, None), (2, other))
    ]
    dynamics = read_dynamics(runs)
    assert (dynamics.seeds, dynamics.names) == ([1, 2], ["model.fan.placement none", "model.fan.placement qkv"])
