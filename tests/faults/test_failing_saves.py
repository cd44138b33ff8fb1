"""Saves on a disk that is full or broken, at every call that they make: told, nothing lost, and the command goes on."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fanformer.checkpoint import store
from megatron_fanformer.errors import FanformerError
from megatron_fanformer.inspection.checkpoint import check_checkpoint
from megatron_fanformer.runtime.parallel import rank_grid
from megatron_fanformer.training.config import config_from_dict
from megatron_fanformer.training.metrics import read_metrics
from megatron_fanformer.training.trainer import Trainer
from tests.faults import commands
from tests.faults.conftest import Things
from tests.faults.failing_calls import FailingCalls, Kind
from tests.patience import wait_until
from tests.small_runs import small_run, write_config

STEPS = 3
SEED = 14
SOME = 2  # of a kind's calls, in every run of the tests
STRIDE = 1 if os.environ.get("FULL_SIZE") else 5  # one call of so many fails

RunOnRanks = Callable[..., list[Any]]


def configuration(things: Things, run: Path, *, is_async: bool, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run that saves after each of three steps and keeps one checkpoint."""
    return small_run(
        things.tokens,
        run,
        data={"tokenizer": str(things.tokenizer)},
        schedule={"lr_warmup_iters": 1},
        training={"train_iters": STEPS},
        checkpoint={"save_interval": 1, "keep": 1, "async_save": is_async},
        **sections,
    )


def train(values: dict[str, Any], folder: Path, target: int = 0, kind: Kind = "full") -> tuple[str, int]:
    """Run a configuration whose saves fail at a call of rank 1; what this rank says, and its calls. On every rank.

    What fails on the main rank alone ends the others by its end, and the ranks of a pool do not end.
    """
    config = config_from_dict(values)
    with (
        rank_grid(config.parallel, "cpu") as grid,
        FailingCalls(folder, 0 if grid.is_main else target, kind).planted() as calls,
    ):
        trainer = Trainer(config, grid)
        try:
            trainer.train()
        except FanformerError as error:
            return str(error), calls.count
        finally:
            trainer.close()
        return "", calls.count


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run)]


def assert_nothing_is_lost(run: Path) -> None:
    """Whatever has a checkpoint's name is one, and undamaged."""
    folders = list((run / store.CHECKPOINTS).glob("step-*"))
    assert folders, "the one from before is there still"
    for folder in folders:
        check_checkpoint(folder)
    assert store.latest_checkpoint(run) in folders


def assert_nothing_is_left(run: Path) -> None:
    """Of unfinished saves and old checkpoints; a thread may still be removing one."""
    wait_until(lambda: not list((run / store.CHECKPOINTS).glob("*.tmp")))


def assert_told(message: str) -> None:
    assert "\n" not in message
    assert "was not written" in message and "; free space" in message, message


class Checkpointer:
    """A run after its first step, and what it comes to."""

    def __init__(self, things: Things, folder: Path, is_async: bool) -> None:
        self.values = configuration(things, folder / "run", is_async=is_async)
        self.run, self._before = folder / "run", folder / "before"
        self._file = write_config(folder / "config.yaml", self.values)
        assert self._command("--training.exit_interval", "1").code == 0
        shutil.copytree(self.run, self._before)
        ended, self.number = self._failing(0, "full")
        assert ended.code == 0, ended.errors
        self.losses = losses(self.run)
        assert len(self.losses) == STEPS and self.number > 0

    def _command(self, *overrides: str) -> commands.Ended:
        return commands.run(["train", "--config", str(self._file), *overrides])

    def _failing(self, target: int, kind: Kind) -> tuple[commands.Ended, int]:
        with FailingCalls(self.run / store.CHECKPOINTS, target, kind).planted() as calls:
            return self._command(), calls.count

    def try_with(self, target: int, kind: Kind) -> bool:
        """Fail a call of its saves, and go on; whether that ended the run."""
        shutil.rmtree(self.run)
        shutil.copytree(self._before, self.run)
        ended, _ = self._failing(target, kind)
        assert ended.code in (0, 1), ended.errors
        if ended.code:
            assert not ended.unlike((1,), most_lines=1), ended.errors
            assert_told(ended.errors.rstrip("\n"))
        assert_nothing_is_lost(self.run)
        assert (again := self._command()).code == 0, again.errors
        assert losses(self.run) == self.losses
        assert_nothing_is_lost(self.run)
        assert_nothing_is_left(self.run)
        return ended.code != 0


def test_a_disk_that_is_full_at_the_start(things: Things, tmp_path: Path) -> None:
    file = write_config(tmp_path / "config.yaml", configuration(things, tmp_path / "run", is_async=False))
    with FailingCalls(tmp_path / "run", 1, "full").planted():
        ended = commands.run(["train", "--config", str(file)])
    assert not ended.unlike((2,), most_lines=1), ended.errors
    assert str(tmp_path / "run") in ended.errors
    assert commands.run(["train", "--config", str(file)]).code == 0


SYNC = [pytest.param(False, id="sync"), pytest.param(True, id="async", marks=pytest.mark.full)]
KINDS: tuple[Kind, ...] = ("full", "broken", "short")


@pytest.mark.parametrize("is_async", SYNC)
def test_some_calls_of_a_save_fail(is_async: bool, things: Things, tmp_path: Path) -> None:
    saves = Checkpointer(things, tmp_path, is_async)
    chance = random.Random(SEED)
    assert any([saves.try_with(chance.randrange(1, saves.number // 2), chance.choice(KINDS)) for _ in range(SOME)])


@pytest.mark.full
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("is_async", SYNC)
def test_every_call_of_a_save_fails(is_async: bool, things: Things, tmp_path: Path) -> None:
    """Each in one of the ways; a call and the ones beside it, which write the same file, in all of them."""
    saves = Checkpointer(things, tmp_path, is_async)
    ends = [saves.try_with(target, KINDS[target % len(KINDS)]) for target in range(1, saves.number + 1, STRIDE)]
    assert any(ends)


@pytest.mark.full
@pytest.mark.parametrize("is_async", [False, True])
def test_calls_of_two_ranks_saves_fail(
    is_async: bool, things: Things, tmp_path: Path, run_on_ranks: RunOnRanks
) -> None:
    """Of the second rank, whose calls are its writer's: both ranks say so, and neither is left waiting."""
    values = configuration(things, tmp_path / "sound", is_async=is_async, parallel={"data_parallel_size": 2})
    _, (_, count) = run_on_ranks(2, train, values, tmp_path / "sound" / store.CHECKPOINTS)
    chance = random.Random(SEED)
    for case in range(6):
        run = tmp_path / f"{case}"
        values["training"]["run_dir"] = str(run)
        target, kind = chance.randrange(count // STEPS + 1, count), chance.choice(KINDS)
        messages = [message for message, _ in run_on_ranks(2, train, values, run / store.CHECKPOINTS, target, kind)]
        if any(messages):
            assert all(messages)
            assert_told(messages[0])
        assert_nothing_is_lost(run)
        run_on_ranks(2, train, values, run / store.CHECKPOINTS)
        assert losses(run) == losses(tmp_path / "sound")
