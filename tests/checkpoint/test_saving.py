"""Saves while training goes on, writers that fail, and states that are not finite."""

import logging
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

from megatron_fanformer.checkpoint import megatron_versions, run_folder
from megatron_fanformer.checkpoint.megatron_versions import WRITER_LOGGER, ResultsFile, run_writer
from megatron_fanformer.checkpoint.saving import CheckpointSaver, check_finite
from megatron_fanformer.errors import DivergenceError, FanformerError
from megatron_fanformer.runtime.agreement import is_main
from tests.checkpoint.states import Pieces, Training, load_and_train, small_model, training, world_size
from tests.patience import PATIENCE_SECONDS, is_running, wait_until
from tests.train.layouts import gather

RunOnRanks = Callable[..., list[Any]]


# -- on every rank


@contextmanager
def writers_do_first(action: Callable[[], None]) -> Iterator[None]:
    """Writers that start within do something before they write."""
    original = megatron_versions.run_writer

    def write_after(*arguments: Any) -> None:
        action()
        original(*arguments)

    with mock.patch.object(megatron_versions, "run_writer", write_after):
        yield


def started_save(run: Training, folder: Path) -> CheckpointSaver:
    """Train two steps, and begin to save them; the writers wait for a file named `go`."""
    run.take_steps(2)
    saver = CheckpointSaver(folder, run.grid, keep=None, async_save=True)
    with writers_do_first(lambda: wait_until((folder / "go").exists)):
        assert run.save(saver) is None
    return saver


def writer_process(saver: CheckpointSaver) -> Any:
    return saver._calls.async_calls[0].async_caller.process


def published(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / run_folder.CHECKPOINTS).glob("[!.]*"))


def train_on_while_saving(layout: str, dtype: torch.dtype, folder: Path) -> tuple[Pieces, Pieces, Any]:
    """Pieces of the state at the save, and when it is published; and how that came about."""
    with training(layout, small_model(), dtype=dtype) as run:
        saver = started_save(run, folder)
        at_save = run.pieces()
        run.take_steps(2)
        early = saver.finish_due(blocking=False), published(folder)
        (folder / "go").touch()
        run.take_steps(1)
        path = saver.finish_due(blocking=True)
        again = saver.finish_due(blocking=True)
        return at_save, run.pieces(), (early, path, again, published(folder))


def lose_the_folder(layout: str, folder: Path) -> str:
    """The folder goes away before it is written into; the error."""
    with training(layout, small_model()) as run:
        saver = started_save(run, folder)
        torch.distributed.barrier()
        if run.grid.is_main:
            for unfinished in (folder / run_folder.CHECKPOINTS).glob(".*"):
                shutil.rmtree(unfinished)
            (folder / "go").touch()
        return failure_of(saver)


def kill_a_writer(layout: str, folder: Path) -> str:
    """The writer of the last rank is killed; the error."""
    with training(layout, small_model()) as run:
        saver = started_save(run, folder)
        if run.grid.rank == run.grid.world_size - 1:
            writer_process(saver).kill()
        torch.distributed.barrier()
        (folder / "go").touch()
        return failure_of(saver)


def kill_what_a_writer_starts(layout: str, folder: Path, async_save: bool) -> str:
    """Whichever process puts tensors into a file is killed on the last rank; the error."""
    with training(layout, small_model()) as run:
        as_it_is = FileSystemWriterAsync.write_preloaded_data
        if run.grid.rank == run.grid.world_size - 1:
            FileSystemWriterAsync.write_preloaded_data = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        try:
            run.take_steps(2)
            saver = CheckpointSaver(folder, run.grid, keep=None, async_save=async_save)
            return failure_of(saver, lambda: run.save(saver))
        finally:
            FileSystemWriterAsync.write_preloaded_data = as_it_is


def failure_of(saver: CheckpointSaver, save: Callable[[], Any] = lambda: None) -> str:
    """What a save ends with, and the main rank alone prints; afterwards there is nothing left of it."""
    with pytest.raises(FanformerError) as caught:
        save()
        saver.finish_due(blocking=True)
    assert caught.value.already_reported is not is_main()
    assert saver.finish_due(blocking=True) is None
    return str(caught.value)


def give_up(layout: str, folder: Path) -> tuple[Any, list[str]]:
    """Close while the writers wait; how they ended, and all that is left of the checkpoint."""
    with training(layout, small_model()) as run:
        saver = started_save(run, folder)
        process = writer_process(saver)
        saver.close()
        process.join(PATIENCE_SECONDS)
        return process.exitcode, [path.name for path in (folder / run_folder.CHECKPOINTS).iterdir()]


# -- what is written


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        pytest.param("tp1-plain", torch.float32, marks=pytest.mark.full),
        pytest.param("dp2", torch.float32, marks=pytest.mark.full),
        ("dp2", torch.bfloat16),
    ],
)
def test_the_checkpoint_holds_the_state_of_its_step_though_training_went_on(
    run_on_ranks: RunOnRanks, tmp_path: Path, layout: str, dtype: torch.dtype
) -> None:
    ranks = run_on_ranks(world_size(layout), train_on_while_saving, layout, dtype, tmp_path)
    checkpoint = tmp_path / run_folder.CHECKPOINTS / "step-00000002"
    for _, _, (early, path, again, after) in ranks:
        assert early == (None, [])
        assert (path, again, after) == (checkpoint, None, ["latest", "step-00000002"])
    at_save, later = (gather([rank[which] for rank in ranks]) for which in (0, 1))
    assert [name for name in at_save if torch.equal(at_save[name], later[name])] == []
    (rank,) = run_on_ranks(1, load_and_train, "tp1-plain", small_model(), dtype, checkpoint)
    loaded = gather([rank.pieces])
    assert loaded.keys() == at_save.keys()
    assert [name for name in loaded if not torch.equal(loaded[name], at_save[name])] == []


# -- writers that fail


@pytest.mark.parametrize(
    ("fail", "arguments", "message"),
    [
        (lose_the_folder, (), "No such file or directory"),
        (kill_a_writer, (), "(rank 1: its writer was killed"),
        (kill_what_a_writer_starts, (True,), "(rank 1: "),
        (kill_what_a_writer_starts, (False,), "(rank 1: "),
    ],
)
def test_a_writer_that_fails_ends_the_run_and_publishes_nothing(
    run_on_ranks: RunOnRanks, tmp_path: Path, fail: Callable[..., str], arguments: tuple[bool, ...], message: str
) -> None:
    error, same = run_on_ranks(2, fail, "dp2", tmp_path, *arguments)
    assert error == same and message in error and "\n" not in error
    assert error.startswith(f"the checkpoint of step 2 was not written to {tmp_path / run_folder.CHECKPOINTS} (rank ")
    assert list((tmp_path / run_folder.CHECKPOINTS).iterdir()) == []


def fail_into_the_log(_rank: int, _buckets: Any, results: Any) -> None:
    """As megatron-core 0.19's writer does."""
    logging.getLogger(WRITER_LOGGER).error("no space left")
    results.put(RuntimeError("a worker failed"))


def test_what_a_writer_logs_is_the_reason() -> None:
    results = ResultsFile()
    arguments = (fail_into_the_log, 0, None, results)
    process = multiprocessing.get_context("fork").Process(target=run_writer, args=arguments)
    process.start()
    process.join()
    assert repr(results.get_nowait()) == repr(RuntimeError("no space left"))


def write_for_ever(*_: Any) -> None:
    time.sleep(PATIENCE_SECONDS)


def start_a_writer(connection: Any) -> None:
    writer = multiprocessing.get_context("fork").Process(target=run_writer, args=(write_for_ever, 0, None, None))
    writer.start()
    connection.send(writer.pid)
    writer.join()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells a process of its parent's end")
def test_a_writer_does_not_outlive_its_rank() -> None:
    ours, theirs = multiprocessing.Pipe()
    rank = multiprocessing.get_context("fork").Process(target=start_a_writer, args=(theirs,))
    rank.start()
    writer = ours.recv()
    time.sleep(0.2)  # it must have got to its work
    assert is_running(writer)
    rank.kill()
    rank.join()
    wait_until(lambda: not is_running(writer), seconds=PATIENCE_SECONDS / 2)


def test_closing_ends_a_writer(run_on_ranks: RunOnRanks, tmp_path: Path) -> None:
    assert run_on_ranks(1, give_up, "tp1-plain", tmp_path) == [(-signal.SIGKILL, [])]


# -- the state to save


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_no_value_that_is_not_finite_is_saved(value: float) -> None:
    sound, tensor = torch.ones(4), torch.arange(-3.0, 3.0)
    state = {"a": ShardedTensor.from_rank_offsets("sound", sound), "b": ShardedTensor.from_rank_offsets("w", tensor)}
    check_finite({"model0": state}, 7)
    tensor[2] = value
    with pytest.raises(DivergenceError, match="step 7 was not saved: w has the value"):
        check_finite({"model0": state}, 7)
