"""Sweeps: their files, their cells, runs that are killed, and reports."""

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from megatron_fanformer import cli
from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.errors import InputError, Interrupted
from megatron_fanformer.experiments.cells import Sweep, read_sweep
from megatron_fanformer.experiments.outcomes import outcomes
from megatron_fanformer.experiments.result import read_result
from megatron_fanformer.experiments.sweep import TRAIN, CellsFailed, run_sweep, write_array
from megatron_fanformer.experiments.sweep_report import CSV, PICTURE, write_report
from tests.experiments.making import STAND_IN, changed, write_sweep
from tests.experiments.stand_in import BASE_THAT_FAILS, train
from tests.small_runs import write_config

Command = tuple[str, ...]
ONE_CELL: dict[str, Any] = {
    "axes": {"size": {"d16": {"model.hidden_size": 16}}},
    "seeds": 1,
    "report": {"compare": "size", "baseline": "d16"},
}


def silent(_line: str) -> None:
    """For what is told of cells."""


def run(sweep: Sweep, command: Command) -> None:
    try:
        run_sweep(sweep, silent, command=command)
    except Interrupted:
        sys.exit(Interrupted.exit_code)


def run_until(
    sweep: Sweep, is_time: Callable[[], bool], number: signal.Signals = signal.SIGKILL, command: Command = STAND_IN
) -> int:
    """Run a sweep in a child, which gets a signal once it is time; its exit code, negative for a signal."""
    child = multiprocessing.get_context("fork").Process(target=run, args=(sweep, command))
    child.start()
    while child.is_alive() and not is_time():
        time.sleep(0.005)
    if child.is_alive():
        os.kill(child.pid or 0, number)
    child.join()
    return child.exitcode or 0


def steps_logged(sweep: Sweep) -> int:
    """Count the steps in the records of all cells."""
    records = (cell.run / "metrics.jsonl" for cell in sweep.cells)
    return sum(record.read_bytes().count(b'"step"') for record in records if record.exists())


def reported(file: Path) -> tuple[Any, ...]:
    """All of a report, but the machine and its seconds."""
    sweep = read_sweep(file, needs_data=True)
    result = msgspec.structs.replace(write_report(sweep), machine={}, seconds=0.0)
    return result, (sweep.folder / CSV).read_text(), (sweep.folder / PICTURE).read_bytes()


@pytest.mark.parametrize(
    ("command", "kills"),
    [(STAND_IN, 3), pytest.param(TRAIN, 20, marks=[pytest.mark.full, pytest.mark.timeout(3000)])],
    ids=["stand-in", "real"],
)
def test_a_sweep_that_is_killed_and_run_again_has_the_same_report(
    command: Command, kills: int, tmp_path: Path, tokens: str
) -> None:
    """Losses of real runs are those of `evaluate` on their checkpoints, too.

    A clock would not do: on a busy machine it measures how busy that is. Two kills of three come once the cells have
    logged so many steps in all, spread over nine tenths of them, the third at the start.
    """
    axes = {"architecture": {"transformer": {"model.fan.placement": "none"}, "fanformer": {}}}
    metric = "loss" if command == STAND_IN else "eval/random/CrossEntropyLoss"
    changes = {
        "training.train_iters": 60,
        "checkpoint.save_interval": 5,
        "evaluation.perplexity": {"sets": {"random": [tokens]}},
    }
    report = {"compare": "architecture", "baseline": "transformer", "metric": metric}
    file = write_sweep(tmp_path, tokens, axes=axes, changes=changes, seeds=1, report=report)
    sweep, generator = read_sweep(file, needs_data=True), random.Random(3)
    assert run_until(sweep, lambda: False, command=command) == 0
    whole = reported(file)
    shutil.rmtree(sweep.folder)
    killed = 0
    for number in range(kills):
        least = 0 if number % 3 == 2 else 0.9 * 2 * 60 * (number + generator.random()) / kills
        killed += run_until(sweep, lambda least=least: steps_logged(sweep) >= least, command=command) < 0  # type: ignore[misc]
    assert killed >= kills / 2
    assert run_until(sweep, lambda: False, command=command) == 0
    assert reported(file) == whole
    for outcome in outcomes(sweep) if command == TRAIN else ():
        output = tmp_path / "evaluated.json"
        words = ["evaluate", str(outcome.cell.run), "--perplexity", f"random={tokens}", "--output", str(output)]
        subprocess.run([sys.executable, "-m", "megatron_fanformer", *words], check=True)
        again = msgspec.json.decode(output.read_bytes())["perplexity"]["random"]["loss"]
        assert outcome.loss == pytest.approx(again, abs=1e-6)
        output.unlink()


def test_a_signal_stops_a_sweep_once_its_cell_has_saved(tmp_path: Path, tokens: str) -> None:
    sweep = read_sweep(write_sweep(tmp_path, tokens, changes={"training.train_iters": 300}), needs_data=True)
    assert run_until(sweep, lambda: steps_logged(sweep) > 9, signal.SIGTERM) == Interrupted.exit_code
    first, *rest = outcomes(sweep)
    assert first.state == "begun" and 0 < first.step < 300
    assert {outcome.state for outcome in rest} == {"to come"}
    assert not list(sweep.folder.glob("*.failed"))


def test_a_cell_that_fails_is_passed_over_and_named_with_its_error(
    tmp_path: Path, tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    axes = {
        "base": {"usual": {}, "broken": {"model.rotary_base": BASE_THAT_FAILS}, "other": {"model.rotary_base": 500}}
    }
    file = write_sweep(tmp_path, tokens, axes=axes, seeds=1, report={"compare": "base", "baseline": "usual"})
    sweep = read_sweep(file, needs_data=True)
    with pytest.raises(CellsFailed, match=r"1 of 3 cells failed: broken,seed=1234;") as failed:
        run_sweep(sweep, silent, command=STAND_IN)
    assert failed.value.exit_code == 4
    broken = next(cell for cell in sweep.cells if "broken" in cell.name)
    killed = (sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(CellsFailed):
        run_sweep(sweep, silent, command=killed)
    assert broken.beside(".failed").read_text().startswith("killed by SIGKILL\n")  # not what its log has of earlier
    with pytest.raises(CellsFailed):
        run_sweep(sweep, silent, command=STAND_IN)
    assert cli.main(["sweep", str(file), "status"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "broken,seed=1234: failed at step 0 of 10: step 3: the loss is nan; lower optimizer.lr" in shown
    assert cli.main(["sweep", str(file), "report"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("no loss: broken,seed=1234: failed")]
    result = read_result(sweep.folder)
    assert [finding.name for finding in result.findings] == ["scaling in parameters: loss of other, less usual's"]
    (finding,) = result.findings
    assert finding.ours == 0 and finding.interval is None and finding.shows is None
    assert "1 seed is fewer than 3" in finding.sentence


@pytest.mark.parametrize("tuned", [False, True])
def test_cells_that_end_with_0_before_their_last_step_are_named(tmp_path: Path, tokens: str, tuned: bool) -> None:
    axes = {"size": {"d16": {}, "d24": {}}, "lr": {"usual": {}}}
    tune = {"tune": "lr"} if tuned else {}
    report = {"compare": "size", "baseline": "d16"}
    changes = {"training.train_iters": 10, "schedule.lr_warmup_iters": 2, "training.exit_interval": 4}
    file = write_sweep(tmp_path, tokens, axes=axes, seeds=1, report=report, changes=changes, **tune)
    names = "usual,d16,seed=1234, usual,d24,seed=1234"
    with pytest.raises(
        CellsFailed, match=f"^{names} ended before the last step by training.exit_interval 4; run the same command"
    ) as early:
        run_sweep(read_sweep(file, needs_data=True), silent, command=("true",))
    assert early.value.exit_code == 1
    for cell in read_sweep(file, needs_data=True).cells:
        train(cell.config.as_dict())
    changed(file, changes={**changes, "training.exit_interval": None})
    run_sweep(read_sweep(file, needs_data=True), silent, command=("false",))  # nothing is left to run


@pytest.mark.parametrize(("stated", "option"), [(None, "--runtime.threads_per_rank 4 "), (3, "")])
def test_cells_at_a_time_share_the_cores_among_all_their_ranks(
    tmp_path: Path, tokens: str, monkeypatch: pytest.MonkeyPatch, stated: int | None, option: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("megatron_fanformer.experiments.sweep.usable_cores", lambda: 17)
    changes = {"runtime.threads_per_rank": stated, "parallel.data_parallel_size": 2}
    file = write_sweep(tmp_path, tokens, **ONE_CELL, changes=changes)
    sweep = read_sweep(file, needs_data=True)
    with pytest.raises(CellsFailed, match="ended before the last step"):
        run_sweep(sweep, silent, jobs=2, command=("echo",))
    assert sweep.cells[0].beside(".log").read_text() == f"{option}--config {sweep.cells[0].beside('.yaml')}\n"


def test_a_report_holds_the_planted_difference_and_saving(tmp_path: Path, tokens: str) -> None:
    """The stand-in's FANformer is 0.05 nats better at every size, with noise of 0.001 by seed."""
    file = write_sweep(tmp_path, tokens, seeds=3)
    changed(file, changes={"training.train_iters": 50})
    for cell in read_sweep(file, needs_data=True).cells:
        train(cell.config.as_dict())
    result, cells, _ = reported(file)
    assert len(cells.splitlines()) == 1 + 2 * 4 * 3
    (saved,) = result.findings
    assert saved.paper == "69.2%" and saved.shows is True and saved.interval[1] < 100
    by_point = {tuple(row[:2]): row for row in result.tables[0].rows}
    for size in ("d16", "d24", "d32", "d48"):
        of_fan, of_transformer = (by_point[name, size][5] for name in ("fanformer", "transformer"))
        assert of_fan - of_transformer == pytest.approx(-0.05, abs=4e-3)
    changed(file, report={"compare": "architecture", "baseline": "transformer"})
    (differing,) = reported(file)[0].findings
    assert differing.interval[0] <= differing.ours <= differing.interval[1] < 0 and differing.shows is True
    assert differing.ours == pytest.approx(-0.05, abs=2e-3)


def test_points_are_listed_with_their_parameters_beside_the_baselines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_sweep(tmp_path, "no-tokens")
    assert cli.main(["sweep", str(file), "dry-run"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    cells = {(*cell.points.values(),): cell for cell in read_sweep(file, needs_data=False).cells}
    none, fan = (cells[name, "d16"].parameters for name in ("transformer", "fanformer"))
    rows = {(*row[:2],): row[2:5] for row in shown}
    assert rows["transformer", "d16"] == [f"{none:,}", "+0.00%", "640"]
    assert rows["fanformer", "d16"] == [f"{fan:,}", f"{fan / none - 1:+.2%}", "640"]


def test_all_that_is_wrong_with_a_file_is_told_before_any_cell_starts(tmp_path: Path, tokens: str) -> None:
    axes = {"size": {"a b": {"model.hidden_size": 8}, "c": {"size": 3}}}
    report = {"compare": "depth", "baseline": "x", "average_steps": 0, "by": ["breadth"]}
    file = write_sweep(tmp_path, tokens, seeds=0, axes=axes, report=report)

    def told() -> list[str]:
        with pytest.raises(InputError) as wrong:
            read_sweep(file, needs_data=False)
        return str(wrong.value).splitlines()

    rules = ("seeds is 0", "average_steps is 0", "'a b'", "axes.size.c has 'size'", "depth is no", "breadth is no")
    assert all(rule in line for rule, line in zip(rules, told(), strict=True))
    changed(file, axes={"size": {"c": 3}})
    assert "it must be a mapping of names to mappings of names to mappings of names to values" in "".join(told())
    axes = {"size": {"ok": {}, "odd": {"model.hidden_size": 30}, "typo": {"model.hiden_size": 32}}}
    report = {"compare": "size", "baseline": "ok"}
    changed(file, axes=axes, seeds=2, report=report)
    lines = told()
    assert [line for line in lines if line.startswith("cell odd,seed=1234 and 1 more: model.hidden_size 30")]
    assert [line for line in lines if "unknown configuration key model.hiden_size; did you mean" in line]
    changed(file, report={**report, "primary": [["od", "ok"]]})
    assert told() == ["report has 'od', no point of size; its points are odd, ok, typo"]
    changed(file, report={**report, "over": "tokens", "primary": [["odd", "ok"]]})
    assert told() == ["report.primary is set, and a power law is fitted over tokens; leave one of them out"]
    changed(file, report={**report, "over": "model.fan"}, axes={"size": {"ok": {}}})
    assert "report.over is model.fan, neither parameters, tokens nor a field that is a number" in told()[0]
    groups = {"evaluation.perplexity": {"groups": ["v3-small"], "folder": "sets"}}
    changed(file, report={**report, "metric": "eval/v3-small-piles-validation/CrossEntropyLoss"}, changes=groups)
    assert told()[0].endswith("; did you mean eval/v3-small-pile-validation/CrossEntropyLoss?")
    changed(file, report=report, changes={"data.train_data": ["nowhere"]})
    assert len(read_sweep(file, needs_data=False).cells) == 2
    with pytest.raises(InputError, match=r"in every cell: .*nowhere"):
        read_sweep(file, needs_data=True)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("training.run_dir", "elsewhere", "which the sweep sets for each cell; leave it out"),
        ("training.seed", 3, "which the sweep sets for each cell; leave it out"),
        ("training.epochs", 2.0, "a sweep's cells state their steps; set train_iters"),
    ],
)
def test_what_a_sweep_decides_itself_is_refused(tmp_path: Path, tokens: str, field: str, value: Any, rule: str) -> None:
    point = {field: value, "training.train_iters": None} if field.endswith("epochs") else {field: value}
    axes = {"size": {"d16": {}, "other": point}}
    file = write_sweep(tmp_path, tokens, axes=axes, seeds=1, report={"compare": "size", "baseline": "d16"})
    with pytest.raises(InputError, match=rule):
        read_sweep(file, needs_data=False)


@pytest.mark.parametrize(
    ("changes", "metric", "message"),
    [
        ({"evaluation.perplexity.sets": {"own": ["a", "b"]}}, "eval/own/CrossEntropyLoss", r"sets\.own \['a'\], and"),
        ({"evaluation.perplexity.chunk_tokens": 8}, "eval/own/CrossEntropyLoss", "chunk_tokens None, and"),
        ({"schedule.lr_decay_style": "linear"}, "loss", "lr_decay_style cosine, and"),
        ({"data.num_workers": 1, "data.allow_change": ["train"], "training.exit_interval": 1}, "loss", None),
        ({"training.micro_batch_size": 1, "training.eval_interval": 1}, "loss", None),
        ({"evaluation.perplexity.sets": {"own": ["a"], "other": ["b"]}}, "eval/own/CrossEntropyLoss", None),
        ({"evaluation.perplexity.chunk_tokens": 8}, "loss", None),
    ],
)
def test_a_cell_whose_loss_was_measured_otherwise_is_not_paired_with_the_others(
    tmp_path: Path, tokens: str, changes: dict[str, Any], metric: str, message: str | None
) -> None:
    first = {
        "training.train_iters": 2,
        "schedule.lr_warmup_iters": 1,
        "evaluation.perplexity.sets": {"own": ["a"]},
        "evaluation.perplexity.limit_tokens": 9,
    }
    file = write_sweep(
        tmp_path, tokens, **ONE_CELL | {"report": ONE_CELL["report"] | {"metric": metric}}, changes=first
    )
    train(read_sweep(file, needs_data=False).cells[0].config.as_dict())
    changed(file, changes=first | changes)
    sweep = read_sweep(file, needs_data=False)
    if message is None:
        assert [outcome.state for outcome in outcomes(sweep)] == ["complete"]
        return
    with pytest.raises(InputError, match=message):
        outcomes(sweep)


def test_a_run_of_before_a_field_was_there_is_the_cells(tmp_path: Path, tokens: str) -> None:
    file = write_sweep(tmp_path, tokens, **ONE_CELL)
    sweep = read_sweep(file, needs_data=True)
    train(sweep.cells[0].config.as_dict())
    saved = sweep.cells[0].run / run_folder.CONFIG
    values = run_folder.read_mapping(saved)
    assert values["training"].pop("z_loss_coefficient") == 0
    write_config(saved, values)
    assert [outcome.state for outcome in outcomes(sweep)] == ["complete"]
    changed(file, changes={"training.train_iters": 10, "schedule.lr_warmup_iters": 2, "training.z_loss_coefficient": 1})
    with pytest.raises(InputError, match=r"has a run with training.z_loss_coefficient 0.0, and the sweep's file"):
        outcomes(read_sweep(file, needs_data=False))


def test_an_arrays_task_starts_its_cell_by_the_users_script(tmp_path: Path, tokens: str) -> None:
    sweep = read_sweep(write_sweep(tmp_path, tokens), needs_data=True)
    script = tmp_path / "one run.sh"
    script.write_text(
        "#!/usr/bin/env bash\n#SBATCH --nodes=2\n# a comment\n#SBATCH --time=1:00\n"
        'set -eu\necho "$@"\nexit "${CODE:-0}"\n'
    )
    array = write_array(sweep, script)
    lines = array.read_text().splitlines()
    assert "#SBATCH --array=0-15" in lines[: lines.index("#SBATCH --nodes=2")]
    environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "5"}
    shown = subprocess.run(
        ["bash", array, "--logging.tensorboard", "true"], env=environment, capture_output=True, text=True, check=True
    )
    assert shown.stdout.split() == ["--config", str(sweep.cells[5].beside(".yaml")), "--logging.tensorboard", "true"]
    assert yaml.safe_load(sweep.cells[5].beside(".yaml").read_text()) == sweep.cells[5].config.as_dict()
    for code, state in (("4", "failed"), ("5", "to come")):
        subprocess.run(["bash", array], env={**environment, "CODE": code}, capture_output=True)
        outcome = outcomes(sweep)[5]
        assert (outcome.state, outcome.diverged) == (state, code == "4"), str(outcome)
