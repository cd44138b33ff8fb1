"""What a run is asked for while it goes on, on ranks of which one is asked."""

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.errors import Interrupted
from megatron_fanformer.train import interrupts
from megatron_fanformer.train.interrupts import InterruptListener
from tests.small_runs import RunOnRanks, small_run, trainer_of


def train_and_ask(values: dict[str, Any], during: str, number: signal.Signals, at_step: int) -> tuple[int, bool]:
    """Train, and send rank 1 a signal during something; the last step, and whether the run was stopped."""
    from megatron_fanformer.train import evaluation

    with trainer_of(values) as trainer:

        def asked(function: Callable[..., Any]) -> Callable[..., Any]:
            def ask(*arguments: Any, **named: Any) -> Any:
                if trainer.step == at_step and trainer.grid.rank == 1:
                    signal.raise_signal(number)
                return function(*arguments, **named)

            return ask

        owner, name = {
            "a step": (trainer, "_attempt"),
            "an evaluation": (evaluation, "evaluate_loss"),
            "a save": (trainer._saves._saver, "save"),
        }[during]
        stopped = False
        with mock.patch.object(owner, name, asked(getattr(owner, name))):
            try:
                trainer.train()
            except Interrupted:
                stopped = True
        return trainer.step, stopped


DP2 = {"data_parallel_size": 2}


@pytest.mark.parametrize("during", ["a step", "an evaluation", "a save"])
def test_a_signal_to_one_rank_stops_all_before_another_step(
    run_on_ranks: RunOnRanks, tmp_path: Path, tokens: str, during: str
) -> None:
    data = {"train_data": [tokens], "valid_data": {"held-out": [tokens]}}
    values = small_run(
        tokens,
        tmp_path / "run",
        parallel=DP2,
        data=data,
        training={"eval_interval": 3, "eval_iters": 2},
        checkpoint={"save_interval": 6, "async_save": True},
    )
    assert run_on_ranks(2, train_and_ask, values, during, signal.SIGTERM, 6) == [(6, True)] * 2
    assert run_folder.latest_checkpoint(tmp_path / "run") == tmp_path / "run" / run_folder.CHECKPOINTS / "step-00000006"


def test_a_signal_to_one_rank_saves_and_the_run_goes_on(run_on_ranks: RunOnRanks, tmp_path: Path, tokens: str) -> None:
    values = small_run(tokens, tmp_path / "run", parallel=DP2)
    assert run_on_ranks(2, train_and_ask, values, "a step", signal.SIGUSR2, 7) == [(20, False)] * 2
    saved = [checkpoint.name for checkpoint in run_folder.complete_checkpoints(tmp_path / "run")]
    assert saved == ["step-00000007", "step-00000020"]


def test_a_file_asks_for_one_save_and_goes_once_that_is_there(
    run_on_ranks: RunOnRanks, tmp_path: Path, tokens: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / run_folder.SAVE_FILE).touch()
    values = small_run(tokens, run, checkpoint={"async_save": True})
    assert run_on_ranks(1, train_and_ask, values, "a step", signal.SIGUSR2, 0) == [(20, False)]
    saved = [checkpoint.name for checkpoint in run_folder.complete_checkpoints(run)]
    assert saved == ["step-00000001", "step-00000020"]
    assert not (run / run_folder.SAVE_FILE).exists()


def test_a_run_ends_after_its_minutes_and_goes_on_by_the_same_command(
    run_on_ranks: RunOnRanks, tmp_path: Path, tokens: str
) -> None:
    values = small_run(tokens, tmp_path / "run", parallel=DP2, training={"exit_duration_in_mins": 1e-6})
    for steps in (1, 2):
        assert run_on_ranks(2, train_and_ask, values, "a step", signal.SIGUSR2, 0) == [(steps, False)] * 2
        latest = run_folder.latest_checkpoint(tmp_path / "run")
        assert latest is not None and latest.name == run_folder.checkpoint_name(steps)


def test_the_minutes_count_from_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert InterruptListener(minutes=1e-3).pending().end  # the tests' own process is older
    assert not InterruptListener(minutes=1e6).pending().end
    now = [1000.0]
    monkeypatch.setattr(interrupts, "seconds_since_start", lambda _process: 90.0)
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    listener = InterruptListener(minutes=10)
    now[0] += 600 - 90
    assert not listener.pending().end
    now[0] += 1
    assert listener.pending().end
