"""The comparisons of a sweep: planted effects and nulls, and the choice of a tuned axis's points."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer import cli
from megatron_fanformer.checkpoint.run_folder import METRICS
from megatron_fanformer.durable_files import write_atomically
from megatron_fanformer.experiments.cells import ReportConfig, Sweep, SweepConfig, read_sweep
from megatron_fanformer.experiments.outcomes import Group, choices, compared, due, group_by_points, in_play, outcomes
from megatron_fanformer.experiments.result import read_result
from megatron_fanformer.experiments.sweep import run_sweep
from megatron_fanformer.experiments.sweep_report import Comparison, comparisons, findings
from tests.experiments.making import STAND_IN, changed, write_sweep
from tests.experiments.stand_in import BASE_THAT_FAILS, PLANTED, train

ARMS = ("transformer", "p0", "fanformer")
PRIMARY = [("fanformer", "transformer"), ("fanformer", "p0")]
SPREAD = 0.02  # of one arm's losses about their seed's


CONFIG = SweepConfig(
    experiment="planted",
    folder="none",
    base="none",
    axes={"arm": {arm: {} for arm in ARMS}, "lr": {"low": {}, "high": {}}},
    tune="lr",
    seeds=5,
    report=ReportConfig(compare="arm", baseline="transformer", primary=PRIMARY),
)


def planted(generator: random.Random, effect: float, *, seeds: int = 5) -> list[Group]:
    """Groups of three arms, each at a rate of its own: FANformer's losses are lower by `effect` at every seed."""
    of_seed = {seed: generator.gauss(3.0, 0.1) for seed in range(seeds)}
    groups = []
    for arm in ARMS:
        losses = {
            seed: mean + generator.gauss(0, SPREAD) - (effect if arm == "fanformer" else 0.0)
            for seed, mean in of_seed.items()
        }
        groups.append(Group({"arm": arm, "lr": generator.choice(["low", "high"])}, None, losses))  # type: ignore[arg-type]
    return groups


def share(of: Callable[[list[Comparison]], bool], effect: float, draws: int) -> float:
    generator = random.Random(7)
    return sum(of(comparisons(CONFIG, planted(generator, effect))) for _ in range(draws)) / draws


def shown(found: list[Comparison]) -> list[bool]:
    return [bool(each.shows) for each in findings(CONFIG, found, steps=300) if not each.exploratory]


def test_planted_nulls_are_called_at_most_as_often_as_is_said() -> None:
    """Any of the two primary comparisons, called lower: half of 5%, since the other half would be higher."""
    called = share(lambda found: any(shown(found)), 0.0, 1000)
    assert called < 0.025 + 3 * 0.005
    uncorrected = share(lambda found: any(each.p < 0.05 for each in found if each.is_primary), 0.0, 1000)  # type: ignore[operator]
    assert uncorrected > 0.05  # what the correction is for: 8%


def test_planted_effects_are_found() -> None:
    """Of two standard deviations of the difference of two runs of one seed, over five seeds."""
    assert share(lambda found: all(shown(found)), 2 * SPREAD * 2**0.5, 200) > 0.8


def test_what_was_not_stated_is_exploratory_and_too_few_seeds_or_steps_show_nothing() -> None:
    groups = planted(random.Random(1), 1.0)
    by_pair = {(each.point, each.baseline): each for each in comparisons(CONFIG, groups)}
    assert list(by_pair) == [*PRIMARY, ("p0", "transformer")]
    assert by_pair["p0", "transformer"].adjusted is None
    *primary, other = findings(CONFIG, list(by_pair.values()), steps=50)
    assert [each.shows for each in primary] == [True, True]
    assert other.shows is None and other.exploratory and "exploratory" in other.sentence
    for steps, seeds in ((49, 5), (50, 2)):
        found = comparisons(CONFIG, planted(random.Random(1), 1.0, seeds=seeds))
        assert {each.shows for each in findings(CONFIG, found, steps=steps)} == {None}
    unfinished = comparisons(CONFIG, [group for group in groups if group.points["arm"] != "p0"])
    assert [(each.point, each.is_primary, each.adjusted) for each in unfinished] == [
        ("fanformer", True, pytest.approx(2 * unfinished[0].p))  # type: ignore[operator]
    ]
    axes, report = {"arm": {arm: {} for arm in ARMS[::2]}}, ReportConfig(compare="arm", baseline="transformer")
    alone = SweepConfig(experiment="one", folder="none", base="none", axes=axes, seeds=5, report=report)
    assert [each.is_primary for each in comparisons(alone, groups[::2])] == [True]


def test_comparisons_are_made_apart_at_the_points_of_an_axis() -> None:
    axes: dict[str, Any] = {"arm": {arm: {} for arm in ARMS[::2]}, "optimizer": {"adamw": {}, "muon": {}}}
    report = ReportConfig(compare="arm", baseline="transformer", primary=PRIMARY[:1], by=["optimizer"])
    two = SweepConfig(experiment="two", folder="none", base="none", axes=axes, seeds=4, report=report)
    losses = {"transformer": 3.0, "fanformer": 2.9}
    groups = [
        Group(
            {"arm": arm, "optimizer": optimizer},
            None,  # type: ignore[arg-type]
            {seed: losses[arm] + 0.01 * seed + 0.002 * (-1) ** seed * (arm == "fanformer") for seed in range(4)},
        )
        for arm in losses
        for optimizer in axes["optimizer"]
    ]
    adamw, muon = comparisons(two, groups)
    assert (adamw.at, muon.at) == ({"optimizer": "adamw"}, {"optimizer": "muon"})
    assert adamw.mean.value == pytest.approx(-0.1) and adamw.adjusted == pytest.approx(2 * adamw.p)  # type: ignore[operator]
    assert ", optimizer muon" in list(findings(two, [adamw, muon], steps=99))[1].sentence


def tuned(place: Path, tokens: str, rates: dict[str, Any]) -> Path:
    """Two arms over rates: the stand-in's loss is lowest at 0.01 for the Transformer, at 0.02 for FANformer."""
    axes = {"architecture": {"transformer": {"model.fan.placement": "none"}, "fanformer": {}}, "lr": rates}
    report = {"compare": "architecture", "baseline": "transformer"}
    changes = {"training.train_iters": 50}
    return write_sweep(place, tokens, axes=axes, tune="lr", seeds=3, report=report, changes=changes)


RATES = {f"{rate:g}": {"optimizer.lr": rate} for rate in (0.005, 0.01, 0.02, 0.04)}


def finished(sweep: Sweep) -> list[str]:
    """Train what is due, until nothing is; return the names in their order."""
    names = []
    while cells := due(in_play(sweep, outcomes(sweep))):
        for cell in cells:
            train(cell.config.as_dict())
            names.append(cell.name)
    return names


def test_the_best_rate_of_each_arm_is_chosen_first_and_measured_at_seeds_of_its_own(
    tmp_path: Path, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tuned(tmp_path, tokens, RATES)
    sweep = read_sweep(file, needs_data=True)
    assert sweep.config.num_cells == 2 * 4 + 2 * 3
    assert [choice.best for choice in choices(sweep, outcomes(sweep))] == [None, None]
    names = finished(sweep)
    assert names[:8] == [f"{arm},{rate},seed=1234" for arm in ("fanformer", "transformer") for rate in RATES]
    chosen = [("fanformer", "0.02"), ("transformer", "0.01")]
    assert names[8:] == [f"{arm},{rate},seed={seed}" for arm, rate in chosen for seed in (1235, 1236, 1237)]
    found = outcomes(sweep)
    (difference,) = comparisons(sweep.config, group_by_points(compared(sweep, found)))
    assert (difference.seeds, difference.pairs) == (3, 3)
    assert difference.mean.value == pytest.approx(-PLANTED, abs=4e-3)
    assert cli.main(["sweep", str(file), "report"]) == 0
    result = read_result(sweep.folder)
    assert [finding.shows for finding in result.findings] == [True]
    (table,) = [table for table in result.tables if "that no comparison has" in table.title]
    assert [row[-2:] for row in table.rows] == [["0.02", False], ["0.01", False]]
    assert cli.main(["sweep", str(file), "status"]) == 0
    assert "fanformer: 0.02 is best" in capsys.readouterr().out


def test_a_sweep_without_a_result_does_not_end_as_a_complete_one(
    tmp_path: Path, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tuned(tmp_path, tokens, {"0.01": {"optimizer.lr": 0.01}})
    sweep = read_sweep(file, needs_data=True)
    finished(sweep)
    metrics = sweep.cells[0].run / METRICS
    whole = metrics.read_text()
    metrics.write_text(whole.replace("validation_loss", "other"))
    for options in ([], ["--slurm", "examples/slurm.sh"]):
        assert cli.main(["sweep", str(file), "run", *options]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert (
            f"fanformer,0.01,seed=1234 has no validation_loss/held-out at its last step; remove {sweep.folder}" in line
        )
    metrics.write_text(whole)
    assert cli.main(["sweep", str(file), "run"]) == 0
    assert "all cells are complete" in capsys.readouterr().out
    shutil.rmtree(sweep.cells[0].run)
    write_atomically(sweep.cells[0].beside(".failed"), "nan\nexit code 4\n")
    assert cli.main(["sweep", str(file), "run"]) == 1
    assert "all points of lr diverged, fanformer; add others" in capsys.readouterr().err


def test_a_rate_that_diverges_is_not_tried_again_and_one_at_the_edge_is_named(
    tmp_path: Path, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {**RATES, "diverges": {"optimizer.lr": 1.0, "model.rotary_base": BASE_THAT_FAILS}}
    del rates["0.04"], rates["0.02"]
    file = tuned(tmp_path, tokens, rates)
    sweep = read_sweep(file, needs_data=True)
    with pytest.raises(Exception, match=r"2 of 12 cells failed: .*,diverges,seed=1234, .*,diverges,seed=1234;"):
        run_sweep(sweep, lambda line: None, jobs=3, command=STAND_IN)
    assert due(in_play(sweep, outcomes(sweep))) == []
    assert cli.main(["sweep", str(file), "status"]) == 0
    shown = capsys.readouterr().out
    assert "transformer: 0.01 is best\n" in shown and "fanformer: 0.01 is best" in shown
    changed(file, axes={**sweep.config.axes, "lr": dict(list(RATES.items())[:3])})
    lines: list[str] = []  # with 0.02 FANformer's best changes, and its runs at 0.01 are in no comparison
    longer = read_sweep(file, needs_data=True)
    *_, last = finished(longer)
    shutil.rmtree(longer.folder / last)
    run_sweep(longer, lines.append, command=STAND_IN)
    assert lines[0] == f"[12/12] {last}"
