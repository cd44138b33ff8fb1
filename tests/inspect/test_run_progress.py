"""How far a run is, by its folder: of one that has ended, one that goes on, and one with files that nobody wrote so."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.checkpoint.run_lock import run_lock
from megatron_fanformer.inspect.run_progress import read_progress
from tests.checkpoint.stores import save
from tests.inspect.conftest import Inspect
from tests.small_runs import write_config, write_tokens

STEPS = 40
PLAIN = [{"step": step, "loss": 9 - 0.1 * step, "tokens": 64 * step} for step in range(1, STEPS + 1)]
METRICS = [{**entry, "tokens_per_second": 640.0, "step_seconds": 0.1} for entry in PLAIN]


def write_run(run: Path, metrics: list[dict[str, Any]], *, steps: int | None = STEPS) -> Path:
    write_config(run / "config.yaml", {"training": {"train_iters": steps}})
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in metrics))
    return run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def test_a_complete_run_is_summed_up(run: Path, inspect: Inspect) -> None:
    evaluated = {20: 6.5, 30: 6.25, 40: 7.0}
    write_run(
        run,
        [
            {**entry, "validation_loss/pages": evaluated[entry["step"]]} if entry["step"] in evaluated else entry
            for entry in METRICS
        ],
    )
    save(run, STEPS)
    assert read_progress(run) == {
        **{"step": 40, "steps": 40, "state": "complete", "saved": 40, "tokens": 2560, "window": 10, "profiles": 0},
        **{"first_loss": 8.9, "last_loss": 5.0, "smoothed_loss": pytest.approx(5.45)},
        **{"validation": {"pages": evaluated}, "events": {}, "running": None, "seconds_left": None},
        **{"tokens_per_second": 640.0, "step_seconds": 0.1},
    }
    (run / "checkpoints" / "latest").unlink()
    (run / "checkpoints" / "step-00000040").rename(run / "checkpoints" / "gone")
    assert " pages (20 6.5, 30 6.25, 40 7)\n" in inspect(run).out


def test_a_run_that_goes_on_has_time_left(run: Path) -> None:
    write_run(run, METRICS[:30])
    assert read_progress(run)["state"] == "nothing runs: train goes on from the beginning"
    with run_lock(run):
        progress = read_progress(run)
    assert progress["seconds_left"] == pytest.approx(1.0)
    assert progress["state"] == progress["running"] and progress["state"].startswith("runs on ")
    assert read_progress(run)["seconds_left"] is None


def test_steps_that_were_not_saved_are_taken_again(run: Path) -> None:
    """A run that was killed before its last checkpoint, or set back to an earlier one, is not complete."""
    write_run(run, METRICS)
    newest = [save(run, step) for step in (10, 20, 30)][-1]
    assert read_progress(run)["state"] == "nothing runs: train goes on from step 30"
    (newest / run_folder.MEGATRON_METADATA).unlink()
    assert read_progress(run)["saved"] == 20
    run_folder.point_to(newest.with_name("step-00000010"), [])
    assert read_progress(run)["saved"] == 10


def test_perplexity_sets_events_and_profiles_are_told(run: Path) -> None:
    write_run(run, [*METRICS[:3], {"step": 4, "skipped": "nan", "tokens": 256, "eval/c4/CrossEntropyLoss": 3.5}])
    events = [(4, "skipped"), (4, "skipped"), (9, "computed_again"), (2, "rewound"), (5, "something else")]
    (run / "recovery.jsonl").write_text("".join(f'{{"step": {step}, "event": "{event}"}}\n' for step, event in events))
    (run / "traces/step-00000001-00000002").mkdir(parents=True)
    progress = read_progress(run)
    assert progress["validation"] == {"c4": {4: 3.5}}
    assert progress["events"] == {"skipped": [4], "computed_again": [9], "rewound": [2]}
    assert progress["profiles"] == 1


def test_what_cannot_be_read_is_left_out(run: Path) -> None:
    write_run(run, [METRICS[0], {"step": 2, "loss": None}, {"step": 3, "skipped": "nan"}], steps=None)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('null\n{"step": "4"}\n{"step": 5, "lo')
    progress = read_progress(run)
    assert (progress["step"], progress["steps"], progress["state"]) == (3, None, "nothing runs")
    assert (progress["last_loss"], progress["window"], progress["step_seconds"]) == (8.9, 1, 0.1)
    (run / "config.yaml").write_text("[")
    (run / "metrics.jsonl").unlink()
    progress = read_progress(run)
    assert (progress["step"], progress["first_loss"]) == (0, None)


def test_the_losses_of_one_run_are_drawn(run: Path, tmp_path: Path, inspect: Inspect) -> None:
    picture = tmp_path / "losses.png"
    write_run(run, [])
    assert "has no loss: the run has not taken a step" in inspect(run, "--picture", picture).error
    write_run(run, METRICS)
    assert inspect(run, "--picture", picture).out == f"{picture}: the losses of {run}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "cannot be written" in inspect(run, "--picture", tmp_path / "no" / "such" / "x.png").error
    assert "is not a run's folder" in inspect(write_tokens(tmp_path / "tokens"), "--picture", picture).error


def test_an_option_of_before_says_what_to_use(inspect: Inspect) -> None:
    assert inspect("run", "--follow").error == "unknown argument --follow; use tail -f RUN/metrics.jsonl"
