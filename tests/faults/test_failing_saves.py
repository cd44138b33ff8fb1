"""Saves on a disk that is full or broken: told in one line, nothing is lost, and the command goes on."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_fanformer.checkpoint import run_folder
from megatron_fanformer.inspect.checkpoint import check_checkpoint
from megatron_fanformer.train.metrics import read_metrics
from tests.faults import commands
from tests.faults.conftest import Things
from tests.patience import wait_until
from tests.small_runs import small_run, write_config

STEPS = 3
CALLS = ("mkdir", "open", "fsync", "rename", "replace", "unlink")


@contextmanager
def failing(name: str, folder: Path, target: int, number: int) -> Iterator[None]:
    """Fail the calls of a function of `os` below a folder from the `target`-th on."""
    call, count = getattr(os, name), [0]

    def counted(path: Any, *arguments: Any, **named: Any) -> Any:
        place = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.path.abspath(path)
        is_reading = name == "open" and not arguments[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if place.startswith(str(folder)) and not is_reading:
            count[0] += 1
            if count[0] >= target:
                raise OSError(number, os.strerror(number), str(path))
        return call(path, *arguments, **named)

    with mock.patch.object(os, name, counted):
        yield


@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_save_that_fails_loses_nothing(is_async: bool, things: Things, tmp_path: Path) -> None:
    """At the first call of a kind, or at the second."""
    run, before = tmp_path / "run", tmp_path / "before"
    checkpoints = run / run_folder.CHECKPOINTS
    values = small_run(
        things.tokens,
        run,
        data={"tokenizer": str(things.tokenizer)},
        schedule={"lr_warmup_iters": 1},
        training={"train_iters": STEPS},
        checkpoint={"save_interval": 1, "keep": 1, "async_save": is_async},
    )
    command = ["train", "--config", str(write_config(tmp_path / "config.yaml", values))]
    assert commands.run([*command, "--training.exit_interval", "1"]).code == 0
    shutil.copytree(run, before)
    assert commands.run(command).code == 0
    losses = [line["loss"] for line in read_metrics(run)]
    ends = []
    for place, name in enumerate(CALLS):
        shutil.rmtree(run)
        shutil.copytree(before, run)
        with failing(name, checkpoints, 1 + place % 2, (errno.ENOSPC, errno.EIO)[place % 2]):
            ended = commands.run(command)
        if ended.code:
            assert not ended.unlike((1,), most_lines=1), ended.errors
            assert "was not written" in ended.errors, ended.errors
        ends.append(ended.code)
        for folder in checkpoints.glob("step-*"):
            check_checkpoint(folder)
        assert run_folder.latest_checkpoint(run) is not None
        assert (again := commands.run(command)).code == 0, again.errors
        assert [line["loss"] for line in read_metrics(run)] == losses
        wait_until(lambda: not list(checkpoints.glob("*.tmp")))  # a thread may still be removing one
    assert 1 in ends


def test_a_disk_that_is_full_at_the_start(things: Things, tmp_path: Path) -> None:
    file = write_config(tmp_path / "config.yaml", small_run(things.tokens, tmp_path / "run"))
    with failing("mkdir", tmp_path / "run", 1, errno.ENOSPC):
        ended = commands.run(["train", "--config", str(file)])
    assert not ended.unlike((2,), most_lines=1), ended.errors
    assert str(tmp_path / "run") in ended.errors
    assert commands.run(["train", "--config", str(file)]).code == 0
