"""How far a run is, by its folder: of one that has ended, one that goes on, and one with files that nobody wrote so."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.checkpoint import store
from megatron_fanformer.checkpoint.run_lock import run_lock
from megatron_fanformer.errors import InputError
from megatron_fanformer.inspection.run_progress import follow, read_progress
from tests.checkpoint.stores import save
from tests.inspection.conftest import Inspect
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


def rows(run: Path) -> list[tuple[str, str]]:
    return list(read_progress(run).rows())


def test_a_complete_run_is_summed_up(run: Path) -> None:
    evaluated = {
        20: {"validation_loss/pages": 6.5},
        30: {"validation_loss/pages": 6.25},
        40: {"validation_loss/pages": 7},
    }
    write_run(run, [{**entry, **evaluated.get(entry["step"], {})} for entry in METRICS])
    save(run, STEPS)
    assert rows(run) == [
        ("steps", "40 of 40, complete"),
        ("tokens", "2,560"),
        ("loss", "8.9000 first, 5.0000 last, 5.4500 over the last 10 steps"),
        ("validation", "pages: 7.0000 at step 40, lowest 6.2500 at step 30"),
        ("speed", "640 tokens/s, 0.1 s a step (medians of the last 10 steps)"),
    ]


def test_a_run_that_goes_on_has_time_left(run: Path) -> None:
    write_run(run, METRICS[:30])
    assert rows(run)[0] == ("steps", "30 of 40; nothing runs: train goes on from the beginning")
    with run_lock(run):
        found = read_progress(run)
    assert found.seconds_left == pytest.approx(1.0)
    output = dict(found.rows())
    assert output["steps"].startswith("30 of 40; runs on ") and output["left"].startswith("0:00:01 at that pace")
    assert read_progress(run).seconds_left is None


def test_steps_that_were_not_saved_are_taken_again(run: Path) -> None:
    """A run that was killed before its last checkpoint, or set back to an earlier one, is not complete."""
    write_run(run, METRICS)
    newest = [save(run, step) for step in (10, 20, 30)][-1]
    assert rows(run)[0] == ("steps", "40 of 40; nothing runs: train goes on from step 30")
    (newest / store.MEGATRON_METADATA).unlink()
    assert rows(run)[0] == ("steps", "40 of 40; nothing runs: train goes on from step 20")
    store.point_to(newest.with_name("step-00000010"), [])
    assert rows(run)[0] == ("steps", "40 of 40; nothing runs: train goes on from step 10")
    assert read_progress(run).as_object()["saved"] == 10


def test_perplexity_sets_events_and_profiles_are_told(run: Path) -> None:
    write_run(run, [*METRICS[:3], {"step": 4, "skipped": "nan", "tokens": 256, "eval/c4/CrossEntropyLoss": 3.5}])
    events = [(4, "skipped"), (4, "skipped"), (9, "computed_again"), (2, "rewound"), (5, "something else")]
    (run / "recovery.jsonl").write_text("".join(f'{{"step": {step}, "event": "{event}"}}\n' for step, event in events))
    (run / "traces/step-00000001-00000002").mkdir(parents=True)
    output = rows(run)
    assert ("validation", "c4: 3.5000 at step 4") in output
    assert [text for label, text in output if label == "events"] == [
        "1 step skipped: 4",
        "1 step computed again: 9",
        "1 step gone back to: 2",
        "1 profile, in traces/",
    ]


def test_what_cannot_be_read_is_left_out(run: Path) -> None:
    write_run(run, [METRICS[0], {"step": 2, "loss": None}, {"step": 3, "skipped": "nan"}], steps=None)
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('null\n{"step": "4"}\n{"step": 5, "lo')
    assert rows(run) == [
        ("steps", "3; nothing runs"),
        ("tokens", "64"),
        ("loss", "8.9000 first, 8.9000 last"),
        ("speed", "640 tokens/s, 0.1 s a step (the last step)"),
    ]
    (run / "config.yaml").write_text("[")
    (run / "metrics.jsonl").unlink()
    assert rows(run) == [("steps", "0; nothing runs")]


def scripted(*moments: Callable[[], object]) -> Callable[[], None]:
    """What is called between looks: each thing that happens meanwhile, in turn."""
    left: Iterator[Callable[[], object]] = iter(moments)
    return lambda: next(left)() and None


def test_a_run_is_followed_to_its_end(run: Path) -> None:
    write_run(run, METRICS[:30])

    def add(text: str) -> int:
        with (run / "metrics.jsonl").open("a") as stream:
            return stream.write(text)

    evaluated = json.dumps({**METRICS[31], "validation_loss/pages": 6.0})
    later = [f"{json.dumps(entry)}\n" for entry in METRICS]
    with ExitStack() as lock:
        lock.enter_context(run_lock(run))
        moments = scripted(
            lambda: add(later[30] + evaluated[:20]),
            lambda: add(f"{evaluated[20:]}\n{later[32]}"),
            lambda: None,
            lambda: (run / "metrics.jsonl").rename(run / "old") and write_run(run, METRICS[:30]),
            lambda: add("".join(later[30:])) and save(run, STEPS) and lock.close(),
        )
        output = list(follow(run, wait=moments))
    assert output == [
        "step 31/40  loss 5.9000  640 tokens/s  left 0:00:01",
        "step 33/40  loss 5.7000  640 tokens/s  left 0:00:01",
        "step 32  validation loss (pages) 6.0000",
        "step 40/40  loss 5.0000  640 tokens/s  left 0:00:00",
        f"saved {run}/checkpoints/step-00000040",
        "the run has ended: 40 of 40, complete",
    ]


def test_a_run_is_followed_from_before_its_first_step(run: Path) -> None:
    with ExitStack() as lock:
        lock.enter_context(run_lock(run))
        output = list(follow(run, wait=lambda: write_run(run, METRICS[:2]) and lock.close()))
    assert output == [
        "step 2  loss 8.8000  640 tokens/s",
        "the run has ended: 2 of 40; nothing runs: train goes on from the beginning",
    ]


def test_where_nothing_runs_there_is_nothing_to_follow(run: Path, inspect: Inspect) -> None:
    write_run(run, METRICS)
    with pytest.raises(InputError, match=r"^nothing runs in .*, so that --follow has nothing to wait for; leave it"):
        list(follow(run, wait=pytest.fail))
    assert inspect(run, "--follow").code == 2
    assert "--verify has no effect with --follow" in inspect(run, "--follow", "--verify").error


def test_the_losses_of_one_run_are_drawn(run: Path, tmp_path: Path, inspect: Inspect) -> None:
    picture = tmp_path / "losses.png"
    write_run(run, [])
    assert "has no loss: the run has not taken a step" in inspect(run, "--picture", picture).error
    write_run(run, METRICS)
    assert inspect(run, "--picture", picture).out == f"{picture}: the losses of {run}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "cannot be written" in inspect(run, "--picture", tmp_path / "no" / "such" / "x.png").error
    for option in (["--picture", picture], ["--follow"]):
        assert "is not a run's folder; name that" in inspect(write_tokens(tmp_path / "tokens"), *option).error
